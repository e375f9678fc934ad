// A question before something that cannot be undone from here.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import { useTask } from "../lib/task";
import { ErrorNote } from "./controls";

interface ConfirmProps {
  /** The question; null: nothing is asked. */
  title: string | null;
  children: ComponentChildren;
  /** What the button does that does nothing. */
  keep: string;
  /** What the other one does. */
  action: ComponentChildren;
  onConfirm: (signal: AbortSignal) => Promise<void>;
  onClose: (isDone: boolean) => void;
}

export function Confirm({ title, children, keep, action, onConfirm, onClose }: ConfirmProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const task = useTask();
  const id = useId();
  useEffect(() => {
    if (title !== null && !dialog.current?.open) dialog.current?.showModal();
  }, [title]);
  return (
    <dialog
      ref={dialog}
      class="dialog"
      aria-labelledby={`${id}-title`}
      aria-describedby={`${id}-text`}
      onClose={(event) => onClose(event.currentTarget.returnValue === "done")}
    >
      <form
        onSubmit={(event) => {
          event.preventDefault();
          task.run(async (signal) => {
            await onConfirm(signal);
            dialog.current?.close("done");
          });
        }}
      >
        <h2 id={`${id}-title`}>{title}</h2>
        <p id={`${id}-text`}>{children}</p>
        <ErrorNote error={task.error} />
        <div class="dialog-actions">
          <button type="button" class="quiet" autofocus onClick={() => dialog.current?.close("")}>
            {keep}
          </button>
          <button type="submit" class="run is-danger" disabled={task.isRunning}>
            {action}
          </button>
        </div>
      </form>
    </dialog>
  );
}
