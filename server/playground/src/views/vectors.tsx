import { view, type ViewProps } from "../lib/view";

type State = Record<never, never>;

function VectorsView(_props: ViewProps<State>) {
  return null;
}

export const vectors = view<State>({
  id: "vectors",
  title: "Vectors",
  icon: "vectors",
  lead: "Directions to steer and to read by.",
  initial: {},
  component: VectorsView,
});
