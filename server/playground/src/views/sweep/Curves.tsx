// A sweep as a map of layers and scales, as curves, and one of its points in numbers.
import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import { fixed, number, percent, short, signed } from "../../lib/format";
import { LineChart, type Series } from "../../parts/LineChart";
import { HeatMap } from "../../parts/HeatMap";
import { Segments } from "../../parts/fields";
import { Table, type TableColumn } from "../../parts/Table";
import { divergingScale, findReach, linearScale } from "../../lib/scales";
import type { Schemas } from "../../lib/api";
import { measureCell, toCsv, type MapMeasure, type Measure, type Swept } from "./request";

interface CurvesProps {
  swept: Swept;
  measure: Measure;
  /** What a scale is a factor of, for the axis. */
  vector: string;
  /** What the map shows. */
  map: MapMeasure;
  onMap: (map: MapMeasure) => void;
  /** Index of the scale that is looked at, and of the set of layers. */
  chosen: number;
  set: number;
  onChoose: (change: { chosen: number; set?: number }) => void;
  /** What belongs to the chosen cell, such as its generation. */
  children?: ComponentChildren;
}

/** Solid for the first set of layers, then dashes of other lengths. */
const DASHES: (number[] | undefined)[] = [undefined, [8, 5], [2, 4], [12, 4, 2, 4]];

const MEASURES: Record<Measure, string> = {
  change: "Change of log-probability, nats",
  logprob: "Log-probability, nats",
  prob: "Probability",
};

export function Curves(props: CurvesProps) {
  const { measure, vector, chosen, set, onChoose } = props;
  const whole = props.swept;
  // Curves of one set of layers: the map has them all.
  const swept = useMemo(() => ({ ...whole, sets: whole.sets.slice(set, set + 1) }), [whole, set]);
  const { cases, scales, hasText, answer } = swept;
  const order = useMemo(() => scales.map((_, at) => at).sort((a, b) => (scales[a] ?? 0) - (scales[b] ?? 0)), [scales]);
  const x = useMemo(() => order.map((at) => scales[at] ?? 0), [order, scales]);
  const lines = useMemo(() => drawTargets(swept, measure, order), [swept, measure, order]);
  const isLikely = lines.some(({ values }) => values.some((value) => (value ?? 0) > 0.5));
  const divergence = useMemo(() => drawDivergence(swept, order), [swept, order]);
  const perplexity = useMemo(() => drawPerplexity(swept, order), [swept, order]);
  const common = {
    x,
    xLabel: `Scale of ${vector}`,
    xFormat: short,
    plainLegend: true,
    onHover: (at: number | null) => {
      if (at !== null) onChoose({ chosen: order[at] ?? 0 });
    },
  };
  return (
    <div class="curves">
      {whole.sets.length > 1 && <LayerMap {...props} order={order} />}
      {whole.sets.length > 1 && props.children}
      {cases.length > 0 && (
        <LineChart
          {...common}
          label={`${MEASURES[measure]} of every target by the scale of ${vector}: the table below says the same in numbers.`}
          series={lines}
          yLabel={MEASURES[measure]}
          yFormat={measure === "prob" ? (v) => `${short(100 * v)} %` : short}
          yRange={measure === "prob" && isLikely ? [0, 1] : undefined}
          rules={measure === "change" ? [0] : []}
          height={280}
          exportName="dose-response"
          csv={() => toCsv(whole)}
        />
      )}
      <Explained swept={swept} index={Math.min(chosen, scales.length - 1)} />
      {whole.sets.length === 1 && props.children}
      <div class="curves-small">
        {cases.length > 0 && (
          <section>
            <h2>How far the next token's distribution moves</h2>
            <LineChart
              {...common}
              label={`Kullback–Leibler divergence from unsteered by the scale of ${vector}.`}
              series={divergence}
              yLabel="KL, nats"
              yFormat={short}
              height={200}
              exportName="dose-response-kl"
            />
          </section>
        )}
        {hasText && (
          <section>
            <h2>Perplexity of the text</h2>
            <LineChart
              {...common}
              label={`Perplexity of the text by the scale of ${vector}; ${number(answer.unsteered.texts[0]?.perplexity)} unsteered.`}
              series={perplexity}
              yLabel="Perplexity"
              yFormat={short}
              height={200}
              logY={isWide(perplexity)}
              exportName="dose-response-perplexity"
              csv={() => toCsv(whole)}
            />
          </section>
        )}
      </div>
      <AllPoints swept={whole} />
    </div>
  );
}

function drawTargets({ cases, sets }: Swept, measure: Measure, order: number[]): Series[] {
  return sets.flatMap(({ name, points }, set) =>
    cases.flatMap(({ context, targets }, item) => {
      const first = cases.slice(0, item).reduce((sum, one) => sum + one.targets.length, 0);
      return targets.map((target, index) => ({
        label: `${cases.length > 1 ? `${shorten(context)}…` : ""}${target}${sets.length > 1 ? `, ${name}` : ""}`,
        colour: first + index,
        dash: DASHES[set % DASHES.length],
        points: order.length <= 30,
        values: order.map((at) => {
          const found = points[at]?.items[item]?.targets[index];
          if (found === undefined) return null;
          if (measure === "prob") return found.logprob === null ? null : Math.exp(found.logprob);
          return found[measure];
        }),
      }));
    }),
  );
}

function drawDivergence({ cases, sets }: Swept, order: number[]): Series[] {
  return sets.flatMap(({ name, points }, set) =>
    cases.map(({ context }, item) => ({
      label: `after ${shorten(context)}${sets.length > 1 ? `, ${name}` : ""}`,
      colour: item,
      dash: DASHES[set % DASHES.length],
      points: order.length <= 30,
      values: order.map((at) => points[at]?.items[item]?.kl ?? null),
    })),
  );
}

function drawPerplexity({ sets }: Swept, order: number[]): Series[] {
  return sets.map(({ name, points }, set) => ({
    label: sets.length > 1 ? name : "perplexity",
    dash: DASHES[set % DASHES.length],
    points: order.length <= 30,
    values: order.map((at) => points[at]?.texts[0]?.perplexity ?? null),
  }));
}

/** Whether numbers come to more than a decade, for which even steps are too small. */
function isWide(series: Series[]): boolean {
  const values = series.flatMap(({ values: all }) => all.filter((v): v is number => v !== null));
  return Math.max(...values) > 10 * Math.min(...values);
}

function shorten(context: string): string {
  return context.length <= 24 ? context : `…${context.slice(-22)}`;
}

const MAPS: Record<MapMeasure, string> = {
  preference: "Log-odds of the first target against the second, nats",
  kl: "KL divergence of the next token, nats",
  perplexity: "Perplexity of the text",
};

/** Layers by scales; a cell is looked at closer, and generated with. */
function LayerMap({ swept, map, onMap, chosen, set, onChoose, order }: CurvesProps & { order: number[] }) {
  const { sets, scales, cases, hasText } = swept;
  const has: Record<MapMeasure, boolean> = { preference: cases.length > 0, kl: cases.length > 0, perplexity: hasText };
  const shown = has[map] ? map : cases.length > 0 ? "preference" : "perplexity";
  const values = useMemo(
    () => sets.map(({ points }) => order.map((at) => measureCell(points[at], shown))),
    [sets, order, shown],
  );
  const scale = useMemo(() => {
    const all = values.flat();
    const { reach, isClipped } = findReach(all);
    if (shown === "preference") return { ...divergingScale(MAPS[shown], reach, short), isClipped };
    return { ...linearScale(MAPS[shown], reach, short), isClipped };
  }, [values, shown]);
  return (
    <section>
      <Segments
        label="The map shows"
        value={shown}
        options={[
          { value: "preference", label: "preference", disabled: !has.preference },
          { value: "kl", label: "KL", disabled: !has.kl },
          { value: "perplexity", label: "perplexity", disabled: !has.perplexity },
        ]}
        onChange={onMap}
      />
      <HeatMap
        label={`${MAPS[shown]}, by layer and scale`}
        rows={sets.map(({ name }) => name.replace("layer ", ""))}
        columns={order.map((at) => short(scales[at] ?? 0))}
        rowLabel="layer"
        columnLabel="scale"
        values={values}
        scale={scale}
        format={(value) => fixed(value, Math.abs(value) < 9.95 ? 2 : 0)}
        chosen={{ row: set, column: order.indexOf(chosen) }}
        onChoose={(row, column) => onChoose({ set: row, chosen: order[column] ?? 0 })}
        exportName="layers-and-scales"
      />
    </section>
  );
}

interface ExplainedRow {
  context: string;
  target: string;
  found: Schemas["SweptTarget"] | undefined;
  kl: number | null;
}

const EXPLAINED: TableColumn<ExplainedRow>[] = [
  { name: "Context", value: ({ context }) => context, isText: true },
  { name: "Target", value: ({ target }) => target, isText: true },
  { name: "Probability", value: ({ found }) => found?.logprob, show: ({ found }) => percent(Math.exp(found?.logprob ?? -Infinity)), isDescending: true },
  { name: "Log-probability", value: ({ found }) => found?.logprob, show: ({ found }) => fixed(found?.logprob, 3), isDescending: true },
  { name: "Change, nats", value: ({ found }) => found?.change, show: ({ found }) => signed(found?.change), isDescending: true },
  { name: "KL, nats", value: ({ kl }) => kl, show: ({ kl }) => number(kl), isDescending: true },
];

/** One scale at one set of layers. */
function Explained({ swept, index }: { swept: Swept; index: number }) {
  const { cases, sets: [set], answer, hasText } = swept;
  const point = set?.points[index];
  const rows = useMemo(
    () =>
      cases.flatMap(({ context, targets }, item) =>
        targets.map((target, nth): ExplainedRow => ({
          context,
          target,
          found: point?.items[item]?.targets[nth],
          kl: point?.items[item]?.kl ?? null,
        })),
      ),
    [cases, point],
  );
  if (set === undefined || point === undefined) return null;
  const facts = [
    set.name,
    point.relative_norm == null ? "nothing is changed" : `the stream changes by ${number(100 * point.relative_norm)} % of its length`,
    ...(hasText ? [`perplexity of the text ${number(point.texts[0]?.perplexity)}, unsteered ${number(answer.unsteered.texts[0]?.perplexity)}`] : []),
  ];
  return (
    <section class="explained" aria-live="polite" aria-label="The chosen scale">
      <h2>
        At scale <span class="num">{short(swept.scales[index] ?? 0)}</span>
      </h2>
      <p class="hint num">{facts.join(" · ")}</p>
      {rows.length > 0 && <Table label="Targets at this scale" rows={rows} columns={EXPLAINED} />}
    </section>
  );
}

interface PointRow {
  layers: string;
  point: Schemas["SweepPoint"];
}

/** Every point that was asked for. */
function AllPoints({ swept }: { swept: Swept }) {
  const { cases, sets, hasText } = swept;
  const rows = useMemo(
    () => sets.flatMap(({ name, points }) => points.map((point): PointRow => ({ layers: name, point }))),
    [sets],
  );
  const columns = useMemo(() => {
    const all: TableColumn<PointRow>[] = [
      { name: "Scale", value: ({ point }) => point.scale, show: ({ point }) => short(point.scale) },
      { name: "Layers", value: ({ layers }) => layers },
      {
        name: "Change of the stream",
        value: ({ point }) => point.relative_norm,
        show: ({ point }) => (point.relative_norm == null ? "–" : `${number(100 * point.relative_norm)} %`),
      },
      ...cases.flatMap(({ context, targets }, item) =>
        targets.map((target, nth): TableColumn<PointRow> => {
          const find = ({ point }: PointRow) => point.items[item]?.targets[nth]?.logprob;
          return { name: `${shorten(context)}${target}`, value: find, show: (row) => fixed(find(row), 3), isDescending: true };
        }),
      ),
    ];
    if (hasText) {
      const find = ({ point }: PointRow) => point.texts[0]?.perplexity;
      all.push({ name: "Perplexity", value: find, show: (row) => number(find(row)) });
    }
    return all;
  }, [cases, hasText]);
  return (
    <details class="more">
      <summary>All points as a table</summary>
      <Table label="All points" rows={rows} columns={columns} />
    </details>
  );
}
