// The button that runs a view, and what it says of errors.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ServerProblem, Unreachable } from "../lib/api";
import type { Task } from "../lib/task";
import { Icon } from "./Icon";

interface RunButtonProps {
  task: Task;
  onRun: () => void;
  label?: string;
  disabled?: boolean;
}

/** Milliseconds of work from which on there is something to cancel: a shorter one only flickers. */
const WORTH_CANCELLING = 250;

/** Runs, and cancels while it runs. Ctrl+Enter or Cmd+Enter anywhere in the form does it, too. */
export function RunButton({ task, onRun, label = "Run", disabled }: RunButtonProps) {
  const [isLong, setLong] = useState(false);
  useEffect(() => {
    setLong(false);
    if (!task.isRunning) return undefined;
    const timer = setTimeout(() => setLong(true), WORTH_CANCELLING);
    return () => clearTimeout(timer);
  }, [task.isRunning]);
  if (task.isRunning && isLong) {
    return (
      <button type="button" class="run is-running" onClick={task.cancel}>
        <Icon name="stop" /> Cancel
      </button>
    );
  }
  return (
    <button type="button" class="run" onClick={onRun} disabled={disabled} title="Ctrl+Enter">
      <Icon name="play" /> {label}
    </button>
  );
}

interface WorkingProps {
  words: string;
  /** How much is done, of 1, where it is known. */
  share?: number;
}

/** Says that there is work, and for how long, once it is worth it. */
export function Working({ words, share }: WorkingProps) {
  const [seconds, setSeconds] = useState<number | null>(null);
  useEffect(() => {
    const began = performance.now();
    const timer = setInterval(() => setSeconds(Math.floor((performance.now() - began) / 1000)), WORTH_CANCELLING);
    return () => clearInterval(timer);
  }, []);
  if (seconds === null) return null;
  return (
    <span class="progress">
      <progress aria-label={words} value={share} />
      <span class="hint num" role="status">
        {words} …
      </span>
      {seconds > 0 && <span class="hint num">{seconds} s</span>}
    </span>
  );
}

interface FormProps {
  /** What the form is for, for those who do not see it. */
  label: string;
  onRun: () => void;
  children: ComponentChildren;
  class?: string;
}

/** A group of inputs in which Ctrl+Enter or Cmd+Enter runs. */
export function RunForm({ label, onRun, children, class: name = "" }: FormProps) {
  return (
    <form
      class={`form ${name}`}
      aria-label={label}
      onSubmit={(event) => {
        event.preventDefault();
        onRun();
      }}
      onKeyDown={(event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
          event.preventDefault();
          onRun();
        }
      }}
    >
      {children}
    </form>
  );
}

interface ErrorProps {
  error: unknown;
  /** Offered where no answer came. */
  onRetry?: () => void;
}

/** What went wrong, in the server's own words; nothing where nothing did. */
export function ErrorNote({ error, onRetry }: ErrorProps) {
  if (error === null || error === undefined) return null;
  const problem = error instanceof ServerProblem ? error.problem : null;
  return (
    <div class="error" role="alert">
      <Icon name="warn" />
      <div>
        <p>{error instanceof Error ? error.message : String(error)}</p>
        {error instanceof Unreachable && onRetry && (
          <button type="button" class="quiet" onClick={onRetry}>
            <Icon name="play" /> Try again
          </button>
        )}
        {problem && (
          <p class="error-code">
            {problem.title} · {problem.code}
            {problem.param ? ` · ${problem.param}` : ""} · {problem.status} · request{" "}
            {problem.request_id}
          </p>
        )}
      </div>
    </div>
  );
}
