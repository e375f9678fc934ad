// Asks for an API key once the server wants one. It is gone with the page, unless the box is ticked.
import { useEffect, useRef, useState } from "preact/hooks";
import { giveKey, keyWanted, refuseKey } from "../lib/api";
import { Checkbox } from "./fields";
import { Icon } from "./Icon";

export function KeyDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const [key, setKey] = useState("");
  const [isKept, setKept] = useState(false);
  const wanted = keyWanted.value;
  useEffect(() => {
    if (wanted !== null && !dialog.current?.open) dialog.current?.showModal();
    if (wanted === null && dialog.current?.open) dialog.current.close();
  }, [wanted]);
  return (
    <dialog ref={dialog} class="dialog" aria-labelledby="key-title" onCancel={refuseKey}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (key.trim() === "") return;
          giveKey(key.trim(), isKept);
          setKey("");
        }}
      >
        <h2 id="key-title">
          <Icon name="key" /> This server wants an API key
        </h2>
        <p>{wanted}</p>
        <div class="field">
          <label for="api-key">API key</label>
          <input
            id="api-key"
            type="password"
            autocomplete="off"
            value={key}
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </div>
        <Checkbox
          label="Remember it in this browser"
          hint="Else it is gone with this page. It is sent to this server only."
          value={isKept}
          onChange={setKept}
        />
        <div class="dialog-actions">
          <button type="button" class="quiet" onClick={refuseKey}>
            Not now
          </button>
          <button type="submit" class="run">
            Use this key
          </button>
        </div>
      </form>
    </dialog>
  );
}
