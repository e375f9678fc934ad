// A list of short texts, a field each; pasted lines become fields of their own.
import { Field } from "./fields";
import { Icon } from "./Icon";

interface LinesProps {
  /** What one of them is, as in `Target`: fields are `Target 1`, `Target 2` … */
  label: string;
  lines: readonly string[];
  onChange: (lines: string[]) => void;
  /** What a new one begins with. */
  fresh?: string;
  /** The number of the first. */
  first?: number;
  /** How few there may be. */
  min?: number;
}

export function Lines({ label, lines, onChange, fresh = "", first = 1, min = 1 }: LinesProps) {
  const replace = (at: number, ...next: string[]): void =>
    onChange([...lines.slice(0, at), ...next, ...lines.slice(at + 1)]);
  return (
    <fieldset class="lines">
      {lines.length > 0 && <legend>{label}s</legend>}
      <ul>
        {lines.map((line, at) => (
          <li key={at}>
            <Field label={`${label} ${at + first}`}>
              {(ids) => (
                <span class="line-input">
                  {line.startsWith(" ") && (
                    <span class="line-space" aria-hidden="true" title="It begins with a space">
                      ␣
                    </span>
                  )}
                  <input
                    {...ids}
                    type="text"
                    dir="auto"
                    spellcheck={false}
                    autocomplete="off"
                    value={line}
                    onInput={(event) => replace(at, event.currentTarget.value)}
                    onPaste={(event) => {
                      const pasted = event.clipboardData?.getData("text/plain").split(/\r?\n/) ?? [];
                      if (pasted.length < 2) return;
                      event.preventDefault();
                      replace(at, ...pasted.filter((one) => one !== ""));
                    }}
                  />
                </span>
              )}
            </Field>
            <button
              type="button"
              class="icon-button"
              aria-label={`Remove ${label.toLowerCase()} ${at + first}`}
              disabled={lines.length <= min}
              onClick={() => replace(at)}
            >
              <Icon name="close" />
            </button>
          </li>
        ))}
        <li>
          <button type="button" class="quiet" onClick={() => onChange([...lines, fresh])}>
            <Icon name="plus" /> Add a {label.toLowerCase()}
          </button>
        </li>
      </ul>
    </fieldset>
  );
}
