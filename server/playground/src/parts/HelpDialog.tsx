// The keys of the page, on `?`.
import { useEffect, useRef } from "preact/hooks";
import { signal } from "@preact/signals";

const KEYS: [keys: string, does: string][] = [
  ["Ctrl + Enter", "runs the form that has the focus; ⌘ + Enter, too"],
  ["← →", "in the tabs: the previous and next view; in a text: the previous and next token"],
  ["↑ ↓", "in a text: the token above and below"],
  ["← → ↑ ↓", "in a map: the cell beside, above and below, whose numbers a card has"],
  ["Home, End", "the first and the last"],
  ["Enter", "in a text: holds the token's card, whose alternatives can be chosen"],
  ["Esc", "lets a card go, closes a dialog"],
  ["Tab", "the next field; the page begins with a link past the tabs"],
  ["?", "these keys"],
];

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.matches("input:not([type=range],[type=checkbox],[type=radio]), textarea, select");
}

/** Set where the keys are to be shown. */
export const isHelpWanted = signal(false);

export function HelpDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const isWanted = isHelpWanted.value;
  useEffect(() => {
    if (isWanted && !dialog.current?.open) dialog.current?.showModal();
  }, [isWanted]);
  useEffect(() => {
    const open = (event: KeyboardEvent): void => {
      if (event.key !== "?" || isTyping(event.target) || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      isHelpWanted.value = true;
    };
    addEventListener("keydown", open);
    return () => removeEventListener("keydown", open);
  }, []);
  return (
    <dialog
      ref={dialog}
      class="dialog"
      aria-labelledby="help-title"
      onClose={() => (isHelpWanted.value = false)}
    >
      <form onSubmit={(event) => (event.preventDefault(), dialog.current?.close())}>
        <h2 id="help-title">Keys</h2>
        <dl class="keys">
          {KEYS.map(([keys, does]) => (
            <div key={keys}>
              <dt>
                <kbd>{keys}</kbd>
              </dt>
              <dd>{does}</dd>
            </div>
          ))}
        </dl>
        <div class="dialog-actions">
          <button type="submit" class="run">
            Close
          </button>
        </div>
      </form>
    </dialog>
  );
}
