// Horizontal bars with their numbers, as a table for those who do not see them.
import type { ComponentChildren } from "preact";

export interface Bar {
  label: ComponentChildren;
  /** Length, of the whole width: 0 to 1. */
  share: number;
  /** The number, as it is read. */
  text: string;
  /** Said under the bar. */
  note?: ComponentChildren;
  /** Stands out: the best, or the one that was taken. */
  isStrong?: boolean;
  /** A second, lighter length, such as that without steering. */
  before?: number;
}

interface BarsProps {
  label: string;
  bars: readonly Bar[];
  isDense?: boolean;
}

export function Bars({ label, bars, isDense = false }: BarsProps) {
  return (
    <ul class={`bars ${isDense ? "is-dense" : ""}`} aria-label={label}>
      {bars.map((bar, index) => (
        <li key={index} class={bar.isStrong ? "is-strong" : ""}>
          <span class="bar-label">{bar.label}</span>
          <span class="bar-track" aria-hidden="true">
            {bar.before !== undefined && (
              <span class="bar-before" style={{ width: width(bar.before) }} />
            )}
            <span class="bar-fill" style={{ width: width(bar.share) }} />
          </span>
          <span class="bar-text num">{bar.text}</span>
          {bar.note && <span class="bar-note">{bar.note}</span>}
        </li>
      ))}
    </ul>
  );
}

function width(share: number): string {
  return `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
}
