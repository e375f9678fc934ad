// The stored vectors, asked for when a view that needs them is seen.
import { useEffect } from "preact/hooks";
import { useTask, type Task } from "../../lib/task";
import { refreshVectors, vectors, type VectorCard } from "../../lib/vectors";

/** The list, null until it is there, and the task that fetches it. */
export function useVectors(isShown: boolean): { cards: VectorCard[] | null; task: Task } {
  const task = useTask();
  useEffect(() => {
    if (isShown) task.run(refreshVectors);
  }, [isShown]);
  return { cards: vectors.value, task };
}
