import { view, type ViewProps } from "../lib/view";

type State = Record<never, never>;

function TextView(_props: ViewProps<State>) {
  return null;
}

export const text = view<State>({
  id: "text",
  title: "Text",
  icon: "text",
  lead: "How surprising is each token of a text?",
  initial: {},
  component: TextView,
});
