import "./examples.css";
import { useMemo, useState } from "preact/hooks";
import { call, upload, type Schemas } from "../lib/api";
import { plural } from "../lib/format";
import { findSae, saes } from "../lib/vectors";
import { findVector } from "../lib/steering";
import { readFile } from "../lib/tables";
import { attempt, useTask } from "../lib/task";
import { view, type ViewProps } from "../lib/view";
import { LacksVector } from "../parts/Beside";
import { CopyAs } from "../parts/CopyAs";
import { ErrorNote, RunButton, RunForm, Working } from "../parts/controls";
import { ChosenFile, Drop, FileButton, NumberField, Segments, TextArea, TextField } from "../parts/fields";
import { Icon } from "../parts/Icon";
import { Panes } from "../parts/Panes";
import SAMPLE from "../sample.txt?raw";
import { Captures } from "./examples/Captures";
import { joinProbe, makeCapture, readTexts, splitProbe, type FormState } from "./examples/request";
import { INITIAL_SHOWN, type ShownState } from "./examples/Tops";
import { useCaptures } from "./examples/useCaptures";
import { describeOwnLayers, VectorSelect } from "./steering/VectorFields";
import { useVectors } from "./steering/useVectors";
import { useReplaced } from "./vectors/Make";

type State = FormState & ShownState & {
  /** The capture that is looked at. */
  opened: string;
};

/** Characters of a file up to which its lines can be edited here. */
const MAX_SHOWN = 300_000;
/** Files that the server reads as they are. */
const IS_JSON_LINES = /\.(jsonl|ndjson)$/i;

function ExamplesView({ state, setState, model, isShown }: ViewProps<State>) {
  const task = useTask();
  const { cards: vectors, task: asked } = useVectors(isShown);
  const captures = useCaptures(isShown);
  const [file, setFile] = useState<File | null>(null);
  const [fileError, setFileError] = useState<unknown>(null);
  const name = state.name.trim();
  const replaced = useReplaced(captures.cards ?? [], name);
  const texts = useMemo(() => readTexts(state.texts), [state.texts]);
  const made = useMemo(
    () =>
      attempt(() =>
        model === null || vectors === null || vectors.length + saes.value.length === 0
          ? null
          : makeCapture(state, model.id, vectors, file === null ? texts : null, file?.size ?? state.texts.length, replaced.overwrite),
      ),
    [state, model?.id, vectors, saes.value, texts, file, replaced.overwrite],
  );
  const body = "value" in made ? made.value : null;
  const canRun = body !== null && name !== "" && state.probes.length > 0 && (file !== null || texts.length > 0) && model?.state === "ready";
  const run = (): void => {
    if (!canRun) return;
    task.run(async (signal) => {
      if (file !== null) {
        const query: Record<string, string> = replaced.overwrite ? { overwrite: "true" } : {};
        await upload("/captures/{name}/source", file, { path: { name }, query, signal });
      }
      captures.change(await call("post", "/captures", body as unknown as Schemas["CaptureRequest"], { signal }));
      setState({ opened: name, ...INITIAL_SHOWN });
    });
  };
  const take = (files: FileList | null | undefined): void => {
    const given = files?.[0];
    if (given === undefined) return;
    setFileError(null);
    // Without a type of its own a file is sent as bytes.
    if (IS_JSON_LINES.test(given.name)) setFile(new File([given], given.name));
    else readFile(given).then(takeText, setFileError);
    function takeText(text: string): void {
      if (text.length <= MAX_SHOWN) {
        setState({ texts: text });
        setFile(null);
        return;
      }
      const lines = readTexts(text).map((line) => `${JSON.stringify(line)}\n`);
      setFile(new File(lines, `${given?.name.replace(/\.\w+$/, "")}.jsonl`));
    }
  };
  const change = (at: number, probe: string): void =>
    setState({ probes: state.probes.map((old, index) => (index === at ? probe : old)) });
  const add = (): void => {
    const used = state.probes.map((probe) => findVector(splitProbe(probe).vector, vectors ?? [])?.name);
    setState({ probes: [...state.probes, vectors?.find((card) => !used.includes(card.name))?.name ?? ""] });
  };
  return (
    <Panes
      form={
        <RunForm label="What is looked for" onRun={run}>
          {vectors !== null && vectors.length + saes.value.length === 0 && <LacksVector />}
          <Drop onTake={take}>
            {file === null ? (
              <TextArea
                label="Texts, one a line"
                value={state.texts}
                rows={5}
                maxRows={7}
                hint={`${plural(texts.length, "text")}. A file of lines, or of JSON lines, can be dropped here.`}
                onChange={(next) => setState({ texts: next })}
              />
            ) : (
              <ChosenFile file={file} onRemove={() => setFile(null)} />
            )}
          </Drop>
          {vectors !== null && state.probes.map((probe, at) => (
            <ProbeFields
              key={at}
              number={at + 1}
              probe={probe}
              cards={vectors}
              onChange={(next) => change(at, next)}
              onRemove={state.probes.length > 1 ? () => setState({ probes: state.probes.filter((_, index) => index !== at) }) : undefined}
            />
          ))}
          <div class="actions">
            <button type="button" class="quiet" onClick={add}>
              <Icon name="plus" /> Add a vector
            </button>
          </div>
          <Segments
            label="Vectors are read by"
            value={state.read}
            options={[
              { value: "cosine", label: "cosine" },
              { value: "projection", label: "projection" },
            ]}
            onChange={(read) => setState({ read })}
          />
          <div class="row">
            <NumberField label="Examples of each" value={state.k} min={1} max={1000} onChange={(k) => setState({ k: k ?? 1 })} />
            <NumberField
              label="Tokens of a text"
              value={state.length || null}
              min={1}
              placeholder="all"
              onChange={(length) => setState({ length: length ?? 0 })}
            />
            <TextField label="Name" value={state.name} onChange={(next) => setState({ name: next })} />
          </div>
          {replaced.checkbox}
          <div class="actions">
            <RunButton task={task} onRun={run} label="Find examples" disabled={!canRun} />
            <FileButton label="Choose a file" accept=".jsonl,.ndjson,.txt" onTake={take} />
            {task.isRunning && <Working words={file === null ? "Sending" : `Uploading ${file.name}`} />}
          </div>
        </RunForm>
      }
      below={
        body !== null && (
          <>
            {file !== null && (
              <CopyAs
                label="Copy the upload as"
                asked={{ endpoint: "captures.put", path: { name }, file: file.name, body: replaced.overwrite ? { overwrite: true } : undefined }}
              />
            )}
            <CopyAs asked={{ endpoint: "captures.start", body }} />
          </>
        )
      }
    >
      <ErrorNote error={"error" in made ? made.error : (fileError ?? task.error ?? asked.error)} onRetry={run} />
      <ErrorNote error={captures.error} onRetry={captures.retry} />
      {captures.cards !== null && (
        <Captures
          cards={captures.cards}
          opened={state.opened}
          state={state}
          setState={setState}
          onOpen={(opened) => setState({ opened, ...INITIAL_SHOWN })}
          onChange={captures.change}
          onDelete={async (gone) => {
            await captures.refresh();
            if (gone === state.opened) setState({ opened: "" });
          }}
        />
      )}
      {captures.cards?.length === 0 && (
        <p class="note">
          Nothing is captured yet. <i>Find examples</i> has the model read the texts, as a job of lowest priority, and lists
          the tokens at which each vector or feature reads highest.
        </p>
      )}
    </Panes>
  );
}

interface ProbeProps {
  number: number;
  probe: string;
  cards: NonNullable<ReturnType<typeof useVectors>["cards"]>;
  onChange: (probe: string) => void;
  onRemove: (() => void) | undefined;
}

function ProbeFields({ number, probe, cards, onChange, onRemove }: ProbeProps) {
  const { vector, layers } = splitProbe(probe);
  const card = findVector(vector, cards);
  const sae = card === undefined ? findSae(vector) : undefined;
  return (
    <div class="probe" role="group" aria-label={`Vector ${number}`}>
      <VectorSelect label={`Vector ${number}`} value={vector} cards={cards} hasFeatures onChange={onChange} />
      {sae === undefined && (
        <TextField
          label="Layer"
          value={layers}
          placeholder={describeOwnLayers(vector, card)}
          onChange={(next) => onChange(joinProbe({ vector: card?.name ?? vector, layers: next }))}
        />
      )}
      {onRemove && (
        <button type="button" class="icon-button" aria-label={`Remove vector ${number}`} onClick={onRemove}>
          <Icon name="close" />
        </button>
      )}
    </div>
  );
}

export const examples = view<State>({
  id: "examples",
  title: "Examples",
  icon: "examples",
  lead: "Where does a vector or a feature read highest?",
  initial: {
    ...INITIAL_SHOWN,
    name: "examples",
    texts: readTexts(SAMPLE).join("\n"),
    probes: [""],
    read: "cosine",
    k: 20,
    length: 0,
    opened: "",
  },
  component: ExamplesView,
});
