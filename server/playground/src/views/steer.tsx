import { view, type ViewProps } from "../lib/view";

type State = Record<never, never>;

function SteerView(_props: ViewProps<State>) {
  return null;
}

export const steer = view<State>({
  id: "steer",
  title: "Steer",
  icon: "steer",
  lead: "What does the model say once its activations are changed?",
  initial: {},
  component: SteerView,
});
