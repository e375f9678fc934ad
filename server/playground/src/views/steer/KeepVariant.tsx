// Keeps the steering of the form under a name, which is then a model.
import { useState } from "preact/hooks";
import { call, type Body } from "../../lib/api";
import { refreshModels } from "../../lib/models";
import type { Json } from "../../lib/snippets";
import { useTask } from "../../lib/task";
import { ErrorNote } from "../../parts/controls";
import { CopyAs } from "../../parts/CopyAs";
import { TextField } from "../../parts/fields";
import { Icon } from "../../parts/Icon";

export function KeepVariant({ model, steering }: { model: string; steering: Json | undefined }) {
  const [name, setName] = useState("");
  const [kept, setKept] = useState("");
  const task = useTask();
  const body = { model, steering };
  const keep = (): void =>
    task.run(async (signal) => {
      await call("put", "/variants/{name}", body as Body<"put", "/variants/{name}">, { path: { name }, signal });
      await refreshModels();
      setKept(name);
    });
  return (
    <details class="more">
      <summary>Keep this as a model</summary>
      <TextField
        label="Name of the variant"
        value={name}
        hint="Every client can then name it as its model. Models lists and deletes variants."
        onChange={setName}
      />
      <div class="actions">
        <button type="button" class="quiet" disabled={name === "" || task.isRunning} onClick={keep}>
          <Icon name="plus" /> Keep the variant
        </button>
        <span class="hint" role="status">{kept !== "" && `${kept} is a model now.`}</span>
      </div>
      <ErrorNote error={task.error} />
      {name !== "" && <CopyAs label="Copy keeping it as" asked={{ endpoint: "variants.put", body, path: { name } }} />}
    </details>
  );
}
