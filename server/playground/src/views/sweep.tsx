import { view, type ViewProps } from "../lib/view";

type State = Record<never, never>;

function SweepView(_props: ViewProps<State>) {
  return null;
}

export const sweep = view<State>({
  id: "sweep",
  title: "Dose–response",
  icon: "sweep",
  lead: "What does steering do, scale by scale?",
  initial: {},
  component: SweepView,
});
