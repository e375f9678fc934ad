// The stored vectors, asked for when a view that needs them is seen.
import { useEffect } from "preact/hooks";
import { useTask, type Task } from "../../lib/task";
import { refreshVectors, vectors, type VectorCard } from "../../lib/vectors";

/** Name the vector that is used where none was chosen: a link then means the same elsewhere. */
export function useNamed(
  chosen: string,
  cards: readonly VectorCard[] | null,
  onName: (name: string) => void,
): void {
  const [first] = cards ?? [];
  useEffect(() => {
    if (chosen === "" && first !== undefined) onName(first.name);
  }, [chosen, first]);
}

/** The list, null until it is there, and the task that fetches it. */
export function useVectors(isShown: boolean): { cards: VectorCard[] | null; task: Task } {
  const task = useTask();
  useEffect(() => {
    if (isShown) task.run(refreshVectors);
  }, [isShown]);
  return { cards: vectors.value, task };
}
