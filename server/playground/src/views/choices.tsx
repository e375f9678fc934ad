import { view, type ViewProps } from "../lib/view";

type State = Record<never, never>;

function ChoicesView(_props: ViewProps<State>) {
  return null;
}

export const choices = view<State>({
  id: "choices",
  title: "Choices",
  icon: "choices",
  lead: "Which of these continues the context best?",
  initial: {},
  component: ChoicesView,
});
