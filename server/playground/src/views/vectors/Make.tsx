// Three ways to a vector: train it, upload it, combine others.
import { useState } from "preact/hooks";
import { call, upload } from "../../lib/api";
import { TRAINING } from "../../lib/example";
import { bytes, plural } from "../../lib/format";
import type { JsonObject } from "../../lib/snippets";
import { useTask } from "../../lib/task";
import { refreshVectors, type VectorCard } from "../../lib/vectors";
import { parseLayers } from "../../lib/steering";
import { CopyAs } from "../../parts/CopyAs";
import { ErrorNote, RunButton, RunForm, Working } from "../../parts/controls";
import { Checkbox, NumberField, Select, TextArea, TextField } from "../../parts/fields";
import { Icon } from "../../parts/Icon";
import { VectorSelect } from "../steering/VectorFields";
import { readPairs } from "./pairs";
import { SAE_CONFIG, UploadSae } from "./Saes";

export type MakeState = {
  name: string;
  pairs: string;
  method: "mean_difference" | "pca" | "logistic" | "lda";
  read: "last" | "mean";
  whiten: boolean;
  layers: string;
  combined: string;
  /** Names and weights, as in `mood:1`. */
  parts: string[];
  without: string;
};

interface MakeProps {
  state: MakeState;
  setState: (change: Partial<MakeState>) => void;
  model: string | undefined;
  cards: readonly VectorCard[];
  onMade: (name: string) => void;
}

export function Train({ state, setState, model, cards, onMade }: MakeProps) {
  const task = useTask();
  const replaced = useReplaced(cards, state.name.trim());
  const { pairs, wrong } = readPairs(state.pairs);
  const layers = state.layers.trim() === "" ? undefined : parseLayers(state.layers);
  const body = {
    model,
    name: state.name.trim(),
    pairs: pairs as unknown as JsonObject[],
    method: state.method,
    read: state.read,
    whiten: state.whiten || undefined,
    layers: layers ?? undefined,
    overwrite: replaced.overwrite,
  } satisfies JsonObject;
  const isWhole = wrong.length === 0 && pairs.length > 0 && body.name !== "" && layers !== null;
  const run = (): void => {
    if (!isWhole) return;
    task.run(async (signal) => {
      await call("post", "/vectors/train", body as never, { signal });
      await refreshVectors();
      onMade(body.name);
    });
  };
  return (
    <RunForm label="Train a vector" onRun={run}>
      <TextArea
        label="Pairs of texts, a pair a line: positive | negative"
        value={state.pairs}
        rows={6}
        maxRows={12}
        hint="A tab also separates two texts, so columns of a spreadsheet can be pasted. JSON lines with positive and negative are read, too."
        onChange={(text) => setState({ pairs: text })}
      />
      <p class={wrong.length ? "wrong" : "hint"} role="status">
        {plural(pairs.length, "pair")}
        {wrong.length > 0 && `; ${wrong.length === 1 ? "line" : "lines"} ${wrong.slice(0, 8).join(", ")} ${wrong.length === 1 ? "is" : "are"} no pair`}
        {pairs.length > 0 && pairs.length < 4 && "; four or more can be held out in turn"}
      </p>
      <div class="row">
        <TextField label="Name" value={state.name} onChange={(name) => setState({ name })} />
        <Select
          label="Method"
          value={state.method}
          options={[
            { value: "mean_difference", label: "mean difference" },
            { value: "pca", label: "first principal component" },
            { value: "logistic", label: "logistic regression" },
            { value: "lda", label: "linear discriminant" },
          ]}
          onChange={(method) => setState({ method })}
        />
        <Select
          label="Activations of"
          value={state.read}
          options={[
            { value: "mean", label: "all tokens, their mean" },
            { value: "last", label: "the last token" },
          ]}
          onChange={(read) => setState({ read })}
        />
        <TextField
          label="Layers"
          value={state.layers}
          placeholder="all"
          hint={layers === null ? "Write them as in 2,5-7." : undefined}
          onChange={(text) => setState({ layers: text })}
        />
      </div>
      {(state.method === "pca" || state.method === "logistic") && (
        <Checkbox
          label="Whiten"
          hint="Count less what varies among texts of one side, too."
          value={state.whiten}
          onChange={(whiten) => setState({ whiten })}
        />
      )}
      {replaced.checkbox}
      <div class="actions">
        <RunButton task={task} onRun={run} label="Train" disabled={!isWhole} />
        {task.isRunning && <Working words={TRAINING} />}
      </div>
      <ErrorNote error={task.error} />
      {isWhole && <CopyAs asked={{ endpoint: "vectors.train", body }} />}
    </RunForm>
  );
}

/** Whether a new vector may take the place of the one of its name; asked where there is one. */
export function useReplaced(cards: readonly { name: string }[], name: string) {
  const [isAllowed, setAllowed] = useState("");
  const isStored = cards.some((card) => card.name === name);
  return {
    overwrite: (isStored && isAllowed === name) || undefined,
    checkbox: isStored && (
      <Checkbox
        label={`Replace ${name}`}
        hint="This name is stored. Without the tick only the same request again is answered."
        value={isAllowed === name}
        onChange={(value) => setAllowed(value ? name : "")}
      />
    ),
  };
}

/** Files that are vectors: what repeng and llama.cpp write, and this server itself. */
export const IS_VECTOR = /\.(safetensors|gguf)$/i;

function nameOf(file: File): string {
  return file.name.replace(/\.\w+$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "");
}

interface UploadProps extends Pick<MakeProps, "cards" | "onMade"> {
  files: readonly File[];
  onTake: (files: FileList | null) => void;
}

export function Upload({ cards, onMade, files, onTake }: UploadProps) {
  const task = useTask();
  const [typed, setTyped] = useState<{ of: File; name: string } | null>(null);
  const [first] = files;
  const nameFor = (file: File): string => (typed?.of === file ? typed.name.trim() : nameOf(file));
  const names = files.map(nameFor);
  const replaced = useReplaced(cards, names[0] ?? "");
  const [done, setDone] = useState(0);
  const canRun = files.length > 0 && names.every((name) => name !== "");
  const run = (): void => {
    if (!canRun) return;
    task.run(async (signal) => {
      for (const [at, file] of files.entries()) {
        setDone(at);
        const query: Record<string, string> = at === 0 && replaced.overwrite ? { overwrite: "true" } : {};
        await upload("/vectors/{name}", file, { path: { name: nameFor(file) }, query, signal });
      }
      await refreshVectors();
      onMade(names[0] ?? "");
    });
  };
  return (
    <>
      <label class="upload-box">
        <input type="file" multiple accept=".safetensors,.gguf,.json" onChange={(event) => onTake(event.currentTarget.files)} />
        <span>
          <Icon name="file" /> {files.length ? files.map((file) => `${file.name}, ${bytes(file.size)}`).join("; ") : "Drop files here, or choose some"}
        </span>
        <span class="hint">
          safetensors; a GGUF control vector, as repeng writes it; or a sparse autoencoder as SAELens
          saves it: cfg.json, sae_weights.safetensors and, if there is one, labels.json. For a file
          of torch.save use <code>logsteer vectors put</code>.
        </span>
      </label>
      {files.some(({ name }) => name === SAE_CONFIG) ? (
        <UploadSae files={files} onDone={() => onTake(null)} />
      ) : (
        <RunForm label="Upload vectors" onRun={run}>
          {first !== undefined && files.length === 1 && (
            <TextField label="Name" value={typed?.of === first ? typed.name : nameOf(first)} onChange={(name) => setTyped({ of: first, name })} />
          )}
          {files.length > 1 && <p class="hint">They are stored as {names.join(", ")}.</p>}
          {replaced.checkbox}
          <div class="actions">
            <RunButton task={task} onRun={run} label="Upload" disabled={!canRun} />
            {task.isRunning && files.length > 1 && <Working words={`${done} of ${files.length} stored`} share={done / files.length} />}
          </div>
          <ErrorNote error={task.error} />
          {first !== undefined && canRun && (
            <CopyAs
              asked={{
                endpoint: "vectors.put",
                path: { name: names[0] ?? "" },
                file: first.name,
                body: replaced.overwrite ? { overwrite: true } : undefined,
              }}
            />
          )}
        </RunForm>
      )}
    </>
  );
}

function readPart(part: string): { name: string; weight: number } {
  const at = part.lastIndexOf(":");
  return { name: part.slice(0, at), weight: Number(part.slice(at + 1)) || 0 };
}

export function Combine({ state, setState, cards, onMade }: MakeProps) {
  const task = useTask();
  const name = state.combined.trim();
  const replaced = useReplaced(cards, name);
  const parts = state.parts.map(readPart).map((part) => ({ ...part, name: part.name || (cards[0]?.name ?? "") }));
  const body = {
    vectors: parts,
    orthogonal_to: state.without === "" ? undefined : [state.without],
    overwrite: replaced.overwrite,
  } satisfies JsonObject;
  const change = (at: number, part: Partial<{ name: string; weight: number }>): void => {
    const next = parts.map((old, index) => (index === at ? { ...old, ...part } : old));
    setState({ parts: next.map((one) => `${one.name}:${one.weight}`) });
  };
  const isWhole = name !== "" && parts.length > 0 && cards.length > 0;
  const run = (): void => {
    if (!isWhole) return;
    task.run(async (signal) => {
      await call("post", "/vectors/{name}/combine", body as never, { path: { name }, signal });
      await refreshVectors();
      onMade(name);
    });
  };
  return (
    <RunForm label="Combine vectors" onRun={run}>
      {parts.map((part, at) => (
        <div class="case" key={at}>
          <VectorSelect label={`Vector ${at + 1}`} value={part.name} cards={cards} onChange={(next) => change(at, { name: next })} />
          <NumberField label="Weight" value={part.weight} step="any" onChange={(weight) => change(at, { weight: weight ?? 0 })} />
          <button
            type="button"
            class="quiet"
            aria-label={`Remove vector ${at + 1}`}
            onClick={() => setState({ parts: state.parts.filter((_, index) => index !== at) })}
          >
            <Icon name="close" />
          </button>
        </div>
      ))}
      <div class="actions">
        <button
          type="button"
          class="quiet"
          onClick={() => setState({ parts: [...state.parts, `${cards[0]?.name ?? ""}:1`] })}
        >
          <Icon name="plus" /> Add a vector
        </button>
      </div>
      <div class="row">
        <VectorSelect
          label="Without what it shares with"
          value={state.without}
          cards={cards}
          none="nothing is taken away"
          onChange={(without) => setState({ without })}
        />
        <TextField label="Name of the sum" value={state.combined} onChange={(combined) => setState({ combined })} />
      </div>
      {replaced.checkbox}
      <div class="actions">
        <RunButton task={task} onRun={run} label="Combine" disabled={!isWhole} />
      </div>
      <ErrorNote error={task.error} />
      {isWhole && <CopyAs asked={{ endpoint: "vectors.combine", body, path: { name } }} />}
    </RunForm>
  );
}
