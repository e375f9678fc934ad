// A few numbers in a row, each with its name.
import type { ComponentChildren } from "preact";

export interface Stat {
  label: string;
  value: ComponentChildren;
  /** Unit, or what the number is compared with. */
  note?: ComponentChildren;
}

export function Stats({ label, stats }: { label: string; stats: readonly Stat[] }) {
  return (
    <dl class="stats" aria-label={label}>
      {stats.map((stat) => (
        <div key={stat.label}>
          <dt>{stat.label}</dt>
          <dd class="num">{stat.value}</dd>
          {stat.note !== undefined && <dd class="stat-note">{stat.note}</dd>}
        </div>
      ))}
    </dl>
  );
}
