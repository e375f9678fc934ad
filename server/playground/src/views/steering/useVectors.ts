// The stored vectors, asked for when a view that needs them is seen.
import { useEffect, useRef } from "preact/hooks";
import { useTask, type Task } from "../../lib/task";
import { askedModel, refreshVectors, vectors, type VectorCard } from "../../lib/vectors";

/** Name the vector that is used where none was chosen: a link then means the same elsewhere. And
 * where another model is asked, which the chosen one does not fit. */
export function useNamed(
  chosen: string,
  cards: readonly VectorCard[] | null,
  onName: (card: VectorCard) => void,
): void {
  const [first] = cards ?? [];
  const chosenFor = useRef<string | undefined>(undefined);
  useEffect(() => {
    if (cards === null || first === undefined) return;
    const isOther = chosenFor.current !== undefined && chosenFor.current !== askedModel.value;
    chosenFor.current = askedModel.value;
    if (chosen === "" || (isOther && !cards.some(({ name }) => name === chosen))) onName(first);
  }, [chosen, cards]);
}

/** The list, null until it is there, and the task that fetches it. */
export function useVectors(isShown: boolean): { cards: VectorCard[] | null; task: Task } {
  const task = useTask();
  useEffect(() => {
    if (isShown) task.run(refreshVectors);
  }, [isShown, askedModel.value]);
  return { cards: vectors.value, task };
}
