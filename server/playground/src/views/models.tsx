import { view, type ViewProps } from "../lib/view";

type State = Record<never, never>;

function ModelsView(_props: ViewProps<State>) {
  return null;
}

export const models = view<State>({
  id: "models",
  title: "Models",
  icon: "models",
  lead: "What this server has resident.",
  initial: {},
  component: ModelsView,
});
