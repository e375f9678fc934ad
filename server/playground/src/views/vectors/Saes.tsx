// Sparse autoencoders: those that are stored, and a new one from the files that SAELens saves.
import { useState } from "preact/hooks";
import { call, send } from "../../lib/api";
import { bytes, count, plural } from "../../lib/format";
import { useTask } from "../../lib/task";
import { refreshVectors, saes, type SaeCard } from "../../lib/vectors";
import { Confirm } from "../../parts/Confirm";
import { ErrorNote, RunButton, RunForm } from "../../parts/controls";
import { CopyAs } from "../../parts/CopyAs";
import { TextField } from "../../parts/fields";
import { Icon } from "../../parts/Icon";
import { linkExamples } from "../examples/request";
import { useReplaced } from "./Make";

export const SAE_CONFIG = "cfg.json";
const FIELDS: Record<string, string> = {
  [SAE_CONFIG]: "config",
  "sae_weights.safetensors": "weights",
  "labels.json": "labels",
};

/** A form for the files of one autoencoder. */
export function UploadSae({ files, onDone }: { files: readonly File[]; onDone: () => void }) {
  const task = useTask();
  const [typed, setTyped] = useState("sae");
  const name = typed.trim();
  const replaced = useReplaced(saes.value, name);
  const taken = files.filter((file) => file.name in FIELDS);
  const lacksWeights = !taken.some((file) => FIELDS[file.name] === "weights");
  const canRun = !lacksWeights && name !== "";
  const run = (): void => {
    if (!canRun) return;
    task.run(async (signal) => {
      const form = new FormData();
      for (const file of taken) form.append(FIELDS[file.name] ?? "", file);
      const query: Record<string, string> = replaced.overwrite ? { overwrite: "true" } : {};
      await send("put", "/saes/{name}", form, { path: { name }, query, signal });
      await refreshVectors();
      onDone();
    });
  };
  return (
    <RunForm label="Upload an autoencoder" onRun={run}>
      <p class="hint">{taken.map((file) => `${file.name}, ${bytes(file.size)}`).join("; ")}</p>
      {lacksWeights && <p class="wrong">Choose sae_weights.safetensors together with {SAE_CONFIG}.</p>}
      <TextField label="Name" value={typed} onChange={setTyped} />
      {replaced.checkbox}
      <div class="actions">
        <RunButton task={task} onRun={run} label="Upload" disabled={!canRun} />
      </div>
      <ErrorNote error={task.error} onRetry={run} />
      {canRun && (
        <CopyAs
          asked={{
            endpoint: "saes.put",
            path: { name },
            form: Object.fromEntries(taken.map((file) => [FIELDS[file.name] ?? "", file.name])),
            body: replaced.overwrite ? { overwrite: true } : undefined,
          }}
        />
      )}
    </RunForm>
  );
}

/** The stored autoencoders. */
export function Saes() {
  const [doomed, setDoomed] = useState<SaeCard | null>(null);
  if (saes.value.length === 0) return null;
  return (
    <section class="stored" aria-labelledby="saes-title">
      <h2 id="saes-title">{plural(saes.value.length, "stored autoencoder")}</h2>
      <ul class="stored-list">
        {saes.value.map((sae) => (
          <li key={sae.name} class="vector">
            <div class="vector-head">
              <b>{sae.name}</b>
              <span class="hint vector-what">
                {sae.architecture} · {count(sae.features)} features, {count(sae.labels)} with a label · {sae.hook} of layer{" "}
                {sae.layer} · {bytes(sae.bytes)}
              </span>
              <span class="vector-actions">
                <a class="quiet" href={`#steer?${new URLSearchParams({ vector: `${sae.name}/0`, scale: "4" })}`}>
                  <Icon name="steer" /> Steer
                </a>
                <a class="quiet" title="Examples" aria-label={`Examples of ${sae.name}`} href={linkExamples(`${sae.name}/0`)}>
                  <Icon name="examples" />
                </a>
                <button type="button" class="quiet" aria-label={`Delete ${sae.name}`} onClick={() => setDoomed(sae)}>
                  <Icon name="trash" />
                </button>
              </span>
            </div>
          </li>
        ))}
      </ul>
      <Confirm
        title={doomed && `Delete ${doomed.name}?`}
        keep="Keep it"
        action={
          <>
            <Icon name="trash" /> Delete
          </>
        }
        onConfirm={async (signal) => {
          await call("delete", "/saes/{name}", undefined, { path: { name: doomed?.name ?? "" }, signal });
          await refreshVectors();
        }}
        onClose={() => setDoomed(null)}
      >
        Requests and links that name its features will fail.
      </Confirm>
    </section>
  );
}
