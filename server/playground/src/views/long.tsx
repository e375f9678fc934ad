import { view, type ViewProps } from "../lib/view";

type State = Record<never, never>;

function LongView(_props: ViewProps<State>) {
  return null;
}

export const long = view<State>({
  id: "long",
  title: "Long text",
  icon: "long",
  lead: "How well does the model read a whole file?",
  initial: {},
  component: LongView,
});
