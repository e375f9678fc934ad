import "./models.css";
import { useEffect, useState } from "preact/hooks";
import { isAway, stream, type ModelCard, type Schemas } from "../lib/api";
import { count, number, plural } from "../lib/format";
import { changeModel, isRefused, refreshModels, reloadConfiguration } from "../lib/models";
import { useTask } from "../lib/task";
import { view, type ViewProps } from "../lib/view";
import { Confirm } from "../parts/Confirm";
import { ErrorNote, RunButton } from "../parts/controls";
import { CopyAs } from "../parts/CopyAs";
import { Select } from "../parts/fields";
import { Icon } from "../parts/Icon";
import { Stats } from "../parts/Stats";
import { Table, type TableColumn } from "../parts/Table";
import { Variants } from "./models/Variants";

type State = {
  /** What a self-test compares a model with; empty: nothing. */
  against: string;
};

type Check = Schemas["SelftestCheck"];

/** Milliseconds between two looks at what models do, while somebody looks. */
const LOOK_MS = 2000;

function ModelsView({ state, setState, models, isShown }: ViewProps<State>) {
  const task = useTask();
  const [reloaded, setReloaded] = useState<Schemas["ReloadAnswer"] | null>(null);
  useEffect(() => {
    if (!isShown) return undefined;
    const timer = setInterval(() => {
      if (!document.hidden) void refreshModels();
    }, LOOK_MS);
    return () => clearInterval(timer);
  }, [isShown]);
  return (
    <div class="models">
      <div class="actions">
        <button
          type="button"
          class="quiet"
          disabled={task.isRunning || isRefused.value}
          onClick={() => task.run(async (signal) => setReloaded(await reloadConfiguration(signal)))}
        >
          <Icon name="file" /> {task.isRunning ? "Reading the configuration …" : "Read the configuration again"}
        </button>
        <span class="hint" role="status">
          {isRefused.value ? "This key has no scope admin: it cannot change models." : reloaded && describeReload(reloaded)}
        </span>
      </div>
      <ErrorNote error={task.error} />
      {models.map((model) => (
        <Model key={model.id} model={model} models={models} state={state} setState={setState} />
      ))}
      <Variants />
      <CopyAs label="Copy this list as" asked={{ endpoint: "models" }} />
      <CopyAs label="Copy reading the configuration as" asked={{ endpoint: "reload" }} />
    </div>
  );
}

function describeReload(answer: Schemas["ReloadAnswer"]): string {
  const parts = (["added", "replaced", "removed", "pending"] as const)
    .filter((what) => answer[what].length > 0)
    .map((what) => `${what}: ${answer[what].join(", ")}`);
  const failed = Object.entries(answer.failed).map(([id, why]) => `${id} could not be changed: ${why}`);
  const restart = answer.needs_restart.length ? [`at the next start: ${answer.needs_restart.join(", ")}`] : [];
  return [...parts, ...failed, ...restart].join("; ") || "The configuration is as it was.";
}

interface ModelProps extends Pick<ViewProps<State>, "models" | "state" | "setState"> {
  model: ModelCard;
}

const STATES: Record<ModelCard["state"], string> = {
  ready: "Ready",
  loading: "Loading",
  restarting: "Restarting",
  failed: "Failed",
  draining: "Draining",
  unloaded: "Unloaded",
};

function Model({ model, models, state, setState }: ModelProps) {
  const made = model.provenance;
  return (
    <article class="sheet model" aria-labelledby={`model-${model.id}`}>
      <header class="model-head">
        <h2 id={`model-${model.id}`}>{model.id}</h2>
        <span class="model-state">
          <span class={`state-dot is-${isAway.value ? "failed" : model.state}`} aria-hidden="true" />
          {isAway.value ? "No answer; before: " : ""}
          {STATES[model.state]}
          {model.state !== "ready" && model.detail && `: ${model.detail}`}
        </span>
      </header>
      <Stats
        label={`Size of ${model.id}`}
        stats={[
          ["Context", model.context_length, "tokens"] as const,
          ["Layers", model.num_layers, "blocks"] as const,
          ["Stream", model.hidden_size, "numbers a token"] as const,
          ["Vocabulary", model.vocab_size, "tokens"] as const,
        ]
          .filter(([, value]) => typeof value === "number")
          .map(([label, value, note]) => ({ label, value: count(value ?? 0), note }))}
      />
      <dl class="facts">
        <Fact name="Engine">
          {model.engine}
          {made && ` ${made.engine_version}`}
        </Fact>
        {made && (
          <>
            <Fact name="Weights">
              {made.model_path} <Digest value={made.weights_digest} />
            </Fact>
            <Fact name="Tokenizer">
              <Digest value={made.tokenizer_digest} />
            </Fact>
            <Fact name="Computed in">{describeNumbers(made)}</Fact>
            <Fact name="Devices">{describeDevices(made)}</Fact>
          </>
        )}
        <Fact name="In work">{describeWork(model)}</Fact>
        <Fact name="Chat">
          {model.has_chat_template ? "has a chat template" : "no chat template: prompts only"}
        </Fact>
        <Fact name="Restarts">
          {plural(model.restarts ?? 0, "restart")}; {model.required ? "counts" : "does not count"}{" "}
          for /readyz
        </Fact>
        {Object.entries(model.lacks ?? {}).map(([what, why]) => (
          <Fact key={what} name={`No ${what}`}>
            {why}
          </Fact>
        ))}
        {model.columns && (
          <Fact name="Columns">
            <span class="columns">
              {model.columns.map((column) => (
                <code key={column}>{column}</code>
              ))}
            </span>
          </Fact>
        )}
      </dl>
      <Changes model={model} />
      <Selftest model={model} models={models} state={state} setState={setState} />
    </article>
  );
}

function Fact({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function Digest({ value }: { value: string }) {
  return <code title={value}>{value.replace(/^(sha256:.{10}).*$/, "$1…")}</code>;
}

function describeNumbers(made: Schemas["Provenance"]): string {
  const parts = [made.dtype, `logits in ${made.logits_dtype}`];
  if (made.quantization) parts.push(`quantised: ${made.quantization}`);
  if (made.tf32) parts.push("products in TF32");
  parts.push(made.batch_invariant ? "batch-invariant" : "not batch-invariant bit for bit");
  return parts.join(", ");
}

function describeDevices({ tensor_parallel: tensor, pipeline_parallel: pipeline }: Schemas["Provenance"]): string {
  if (tensor * pipeline === 1) return "one rank";
  return `tensor parallel ${tensor}, pipeline parallel ${pipeline}`;
}

/** Running sequences, and the engine processes where there are several. */
function describeWork({ replicas = [] }: ModelCard): string {
  const jobs = replicas.reduce((sum, { num_jobs: own = 0 }) => sum + own, 0);
  const each = replicas.map(({ state, num_jobs: own = 0 }, at) => `replica ${at + 1} ${state}, ${own}`);
  return `${jobs === 0 ? "nothing" : plural(jobs, "sequence")}${replicas.length > 1 ? ` (${each.join("; ")})` : ""}`;
}

/** What a key with the scope admin may do with a model. */
function Changes({ model }: { model: ModelCard }) {
  const task = useTask();
  const [isAsked, setAsked] = useState(false);
  const change = (what: "load" | "drain"): void => task.run((signal) => changeModel(model.id, what, signal));
  const isOff = isRefused.value || task.isRunning;
  const answers = model.state === "ready" || model.state === "restarting";
  return (
    <section class="changes" aria-label={`Changes of ${model.id}`}>
      <div class="actions">
        <button type="button" class="quiet" disabled={isOff || answers || model.state === "loading"} onClick={() => change("load")}>
          <Icon name="play" /> Load
        </button>
        <button type="button" class="quiet" disabled={isOff || !answers} onClick={() => change("drain")}>
          <Icon name="stop" /> Drain
        </button>
        <button type="button" class="quiet" disabled={isOff || model.state === "unloaded"} onClick={() => setAsked(true)}>
          <Icon name="close" /> Unload
        </button>
        <span class="hint">Drain: no new requests, the engine stays. Unload: its memory is given back.</span>
      </div>
      <ErrorNote error={task.error} />
      <details class="more">
        <summary>Copy these changes</summary>
        {(["load", "drain", "unload"] as const).map((what) => (
          <CopyAs
            key={what}
            label={`Copy ${what} as`}
            asked={{ endpoint: `${what}_model`, path: { model_id: model.id } }}
          />
        ))}
      </details>
      <Confirm
        title={isAsked ? `Unload ${model.id}?` : null}
        keep="Leave it loaded"
        action="Unload"
        onConfirm={(signal) => changeModel(model.id, "unload", signal)}
        onClose={() => setAsked(false)}
      >
        Requests that are running are answered first. Then its engine ends, and requests for it are refused
        until it is loaded again{model.required ? "; the server is not ready meanwhile" : ""}.
      </Confirm>
    </section>
  );
}

function Selftest({ model, models, state, setState }: ModelProps) {
  const task = useTask();
  const [checks, setChecks] = useState<Check[] | null>(null);
  const [answer, setAnswer] = useState<Schemas["SelftestAnswer"] | null>(null);
  const others = models.filter((other) => other.id !== model.id && other.state === "ready");
  const against = others.some((other) => other.id === state.against) ? state.against : "";
  const body = against ? { against } : {};
  const run = (): void =>
    task.run(async (signal) => {
      setChecks([]);
      setAnswer(null);
      const done = await stream(
        "/models/{model_id}/selftest",
        body,
        (name, data) => {
          if (name === "check") setChecks((old) => [...(old ?? []), data as Check]);
        },
        { signal, path: { model_id: model.id } },
      );
      setAnswer(done);
      setChecks(done.checks);
    });
  return (
    <section class="selftest" aria-label={`Self-test of ${model.id}`}>
      <div class="actions">
        <RunButton
          task={task}
          onRun={run}
          label="Run the self-test"
          disabled={model.state !== "ready"}
        />
        {others.length > 0 && (
          <Select
            label="Compared with"
            value={against}
            options={[
              { value: "", label: "No other model" },
              ...others.map((other) => ({ value: other.id, label: other.id })),
            ]}
            onChange={(chosen) => setState({ against: chosen })}
          />
        )}
        <span class="hint" role="status">
          {task.isRunning
            ? `${plural(checks?.length ?? 0, "promise")} measured so far …`
            : answer
              ? `${answer.verdict === "passed" ? "Passed" : answer.verdict === "failed" ? "Failed" : "Not run"}: ` +
                `${answer.num_texts} texts, ${plural(answer.num_tokens, "token")}, ${number(answer.seconds)} s`
              : "What this service promises, measured on this model."}
        </span>
      </div>
      <ErrorNote error={task.error} />
      {checks && checks.length > 0 && <Table label="Promises and their verdicts" rows={checks} columns={COLUMNS} exportName={`selftest-${model.id}`} />}
      <CopyAs
        label="Copy the self-test as"
        asked={{ endpoint: "selftest", body, path: { model_id: model.id } }}
      />
    </section>
  );
}

const VERDICTS: Record<Check["verdict"], string> = {
  passed: "Passed",
  failed: "Failed",
  not_run: "Not run",
};

const COLUMNS: TableColumn<Check>[] = [
  {
    name: "Promise",
    value: (check) => check.promise,
    show: (check) => (
      <>
        {check.promise}
        <span class="hint">{check.reason}</span>
      </>
    ),
    isText: true,
  },
  {
    name: "Verdict",
    value: (check) => VERDICTS[check.verdict],
    show: (check) => (
      <span class={`verdict is-${check.verdict}`}>
        {check.verdict === "not_run" ? "–" : <Icon name={check.verdict === "passed" ? "check" : "close"} />}{" "}
        {VERDICTS[check.verdict]}
      </span>
    ),
  },
  { name: "Largest difference", value: (check) => check.largest_difference, show: (check) => number(check.largest_difference), isDescending: true },
  { name: "Tolerance", value: (check) => check.tolerance, show: (check) => (check.verdict === "not_run" ? "–" : number(check.tolerance)) },
  { name: "Compared", value: (check) => check.num_compared, show: (check) => count(check.num_compared), isDescending: true },
];

export const models = view<State>({
  id: "models",
  title: "Models",
  icon: "models",
  lead: "What this server has resident.",
  initial: { against: "" },
  component: ModelsView,
});
