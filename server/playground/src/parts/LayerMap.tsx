// Layers by tokens: the last layer above, the first token at the left.
import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import { visible } from "../lib/format";
import type { Scale } from "../lib/scales";
import { HeatMap } from "./HeatMap";

interface LayerMapProps {
  title: string;
  /** What is to be seen, for those who do not see it. */
  label: string;
  /** A layer, or several, in the order of the model. */
  layers: readonly string[];
  tokens: readonly string[];
  /** By layer, then by token. */
  values: readonly (readonly (number | null | undefined)[])[];
  scale: Scale;
  format: (value: number) => string;
  /** What cells say in place of their numbers. */
  texts?: readonly (readonly string[])[];
  /** What the card of a cell says, by layer and token. */
  describe?: (layer: number, token: number) => ComponentChildren;
  exportName: string;
  children?: ComponentChildren;
}

export function LayerMap({ title, label, layers, tokens, values, texts, describe, children, ...rest }: LayerMapProps) {
  const last = layers.length - 1;
  const rows = useMemo(() => [...layers].reverse(), [layers]);
  const cells = useMemo(() => [...values].reverse(), [values]);
  const words = useMemo(() => texts && [...texts].reverse(), [texts]);
  const columns = useMemo(() => tokens.map(visible), [tokens]);
  return (
    <div class="sheet">
      <h2>{title}</h2>
      <HeatMap
        {...rest}
        label={`${title}: ${label}`}
        rows={rows}
        columns={columns}
        rowLabel="layer"
        columnLabel="token"
        values={cells}
        texts={words}
        describe={describe && ((row, column) => describe(last - row, column))}
      />
      {children && <p class="hint">{children}</p>}
    </div>
  );
}
