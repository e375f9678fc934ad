// A form and what it asked for: beside each other where there is room, else one below the other.
import type { ComponentChildren } from "preact";

interface PanesProps {
  form: ComponentChildren;
  /** What is under the form, such as ways to copy its request. */
  below?: ComponentChildren;
  children: ComponentChildren;
}

export function Panes({ form, below, children }: PanesProps) {
  return (
    <div class="panes">
      <div class="pane-form">
        {form}
        {below}
      </div>
      <div class="pane-result">{children}</div>
    </div>
  );
}
