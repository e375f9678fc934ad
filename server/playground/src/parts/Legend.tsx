import { colourAt, type Scale } from "../lib/scales";
import { isDark } from "../lib/theme";

const STEPS = 28;

/** A colour scale with its numbers. */
export function Legend({ scale }: { scale: Scale }) {
  const dark = isDark.value;
  const [low, high] = scale.kind === "diverging" ? [-1, 1] : [0, 1];
  return (
    <figure class="legend">
      <figcaption>{scale.label}</figcaption>
      <div class="legend-scale">
        <svg viewBox={`0 0 ${STEPS} 1`} preserveAspectRatio="none" aria-hidden="true">
          {Array.from({ length: STEPS }, (_, step) => (
            <rect
              key={step}
              x={step}
              width="1.05"
              height="1"
              fill={colourAt(scale.kind, low + ((high - low) * step) / (STEPS - 1), dark)}
            />
          ))}
        </svg>
        <div class="legend-ticks num">
          {scale.ticks.map((tick, at) => {
            const share = (scale.place(tick) - low) / (high - low);
            const isFirst = at === 0;
            const isLast = share > 0.94;
            const beyond = scale.isClipped && isLast ? "≥ " : scale.isClipped && isFirst && low < 0 ? "≤ " : "";
            return (
              <span
                key={tick}
                class={isFirst ? "is-first" : isLast ? "is-last" : ""}
                style={{ left: `${100 * share}%` }}
              >
                {beyond}
                {scale.format(tick)}
              </span>
            );
          })}
        </div>
      </div>
    </figure>
  );
}
