// The request that a view sends, as text that runs as it is.
import { useEffect, useRef, useState } from "preact/hooks";
import { apiKey, BASE } from "../lib/api";
import { attempt } from "../lib/task";
import { findUnsaid, toCommand, toCurl, toPython, type Asked } from "../lib/snippets";
import { Icon } from "./Icon";

type Form = "curl" | "python" | "cli";
const NAMES: Record<Form, string> = { curl: "curl", python: "Python", cli: "CLI" };

/** Buttons that copy a request; the last copied text is shown. */
export function CopyAs({ asked, label = "Copy as" }: { asked: Asked; label?: string }) {
  const [form, setForm] = useState<Form | null>(null);
  const [isCopied, copy] = useCopy();
  const made = attempt(() => toCommand(asked, BASE));
  const command = "value" in made ? made.value : null;
  const unsaid = findUnsaid(asked);
  const write: Record<Form, () => string | null> = {
    curl: () => toCurl(asked, BASE, apiKey.value !== ""),
    python: () => toPython(asked, BASE),
    cli: () => command,
  };
  const choose = async (next: Form): Promise<void> => {
    const isSame = form === next;
    setForm(isSame ? null : next);
    if (isSame) return;
    await copy(write[next]() ?? "");
  };
  const shown = form === null ? null : write[form]();
  return (
    <div class="copy-as">
      <div class="copy-row" role="group" aria-label={label}>
        <span class="copy-label">{label}</span>
        {(Object.keys(NAMES) as Form[])
          .filter((name) => name !== "cli" || command !== null)
          .map((name) => (
            <button
              key={name}
              type="button"
              class="quiet"
              aria-expanded={form === name}
              data-copy={name}
              onClick={() => void choose(name)}
            >
              <Icon name={isCopied && form === name ? "check" : "copy"} /> {NAMES[name]}
            </button>
          ))}
        {"error" in made && <span class="hint">no CLI: {(made.error as Error).message}</span>}
        {command !== null && unsaid.length > 0 && <span class="hint">the command leaves out {unsaid.join(", ")}</span>}
        <span class="copied" role="status">
          {isCopied ? "Copied" : ""}
        </span>
      </div>
      {shown !== null && (
        <pre class="snippet" tabIndex={0} aria-label={`This request for ${NAMES[form as Form]}`}>
          <code>{shown}</code>
        </pre>
      )}
    </div>
  );
}

/** Return what copies a text, and whether it has just done so. */
export function useCopy(): [isCopied: boolean, copy: (text: string) => Promise<void>] {
  const [isCopied, setCopied] = useState(false);
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = async (text: string): Promise<void> => {
    await copyText(text);
    setCopied(true);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setCopied(false), 2000);
  };
  return [isCopied, copy];
}

/** Copy a text; pages without a secure origin have no clipboard, and select it instead. */
export async function copyText(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "off-screen";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
