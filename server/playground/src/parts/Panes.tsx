// A form and what it asked for: beside each other where there is room, else one below the other.
import type { ComponentChildren } from "preact";
import { useStaying } from "../lib/task";

interface PanesProps {
  form: ComponentChildren;
  /** What is under the form, such as ways to copy its request. */
  below?: ComponentChildren;
  /** Whether the form has changed since it asked for what is shown. */
  isStale?: boolean;
  children: ComponentChildren;
}

export function Panes({ form, below, isStale = false, children }: PanesProps) {
  const isOld = useStaying(isStale);
  return (
    <div class="panes">
      <div class="pane-form">
        {form}
        {below}
      </div>
      <div class={`pane-result ${isOld ? "is-stale" : ""}`}>
        {isOld && (
          <p class="hint" role="status">
            The form has changed since: this answers the request before.
          </p>
        )}
        {children}
      </div>
    </div>
  );
}
