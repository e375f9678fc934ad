// Colour scales for text: even steps of lightness in OKLCH, so that equal differences look equal,
// print in grey, and keep their order for every kind of colour vision. The text on them keeps a
// contrast above 4.5 at every step.

export type Rgb = readonly [number, number, number];
export type ScaleKind = "sequential" | "diverging";

interface Stop {
  lightness: number;
  chroma: number;
  hue: number;
}

const SEQUENTIAL: Record<"light" | "dark", Stop[]> = {
  light: [
    { lightness: 0.985, chroma: 0.004, hue: 95 },
    { lightness: 0.92, chroma: 0.075, hue: 88 },
    { lightness: 0.82, chroma: 0.13, hue: 66 },
    { lightness: 0.69, chroma: 0.165, hue: 40 },
  ],
  dark: [
    { lightness: 0.235, chroma: 0.006, hue: 280 },
    { lightness: 0.31, chroma: 0.06, hue: 320 },
    { lightness: 0.39, chroma: 0.115, hue: 355 },
    { lightness: 0.475, chroma: 0.145, hue: 30 },
  ],
};

const BELOW: Record<"light" | "dark", Stop> = {
  light: { lightness: 0.72, chroma: 0.115, hue: 245 },
  dark: { lightness: 0.45, chroma: 0.115, hue: 250 },
};
const ABOVE: Record<"light" | "dark", Stop> = {
  light: { lightness: 0.72, chroma: 0.15, hue: 55 },
  dark: { lightness: 0.45, chroma: 0.115, hue: 50 },
};

function mix(from: Stop, to: Stop, share: number): Stop {
  const turn = ((to.hue - from.hue + 540) % 360) - 180;
  return {
    lightness: from.lightness + (to.lightness - from.lightness) * share,
    chroma: from.chroma + (to.chroma - from.chroma) * share,
    // A grey has no hue of its own: it takes the other's.
    hue: from.chroma < 0.01 ? to.hue : from.hue + turn * share,
  };
}

/** OKLCH to sRGB: Ottosson's matrices, each channel cut to what a screen shows. */
function toRgb({ lightness, chroma, hue }: Stop): Rgb {
  const angle = (hue * Math.PI) / 180;
  const [a, b] = [chroma * Math.cos(angle), chroma * Math.sin(angle)];
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const encode = (linear: number): number => {
    const value = linear <= 0.0031308 ? 12.92 * linear : 1.055 * linear ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, value)));
  };
  return [
    encode(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    encode(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    encode(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

/** The colour at `at`: 0 to 1 of a sequential scale, -1 to 1 of a diverging one. */
export function colourAt(kind: ScaleKind, at: number, isDark: boolean): string {
  const theme = isDark ? "dark" : "light";
  const stops = SEQUENTIAL[theme];
  const neutral = stops[0] as Stop;
  let stop: Stop;
  if (kind === "diverging") {
    const share = Math.min(1, Math.abs(at));
    stop = mix(neutral, (at < 0 ? BELOW : ABOVE)[theme], share);
  } else {
    const place = Math.min(1, Math.max(0, at)) * (stops.length - 1);
    const index = Math.min(Math.floor(place), stops.length - 2);
    stop = mix(stops[index] as Stop, stops[index + 1] as Stop, place - index);
  }
  return `rgb(${toRgb(stop).join(" ")})`;
}

/** How a column of numbers becomes colours: `place` maps a value to where it is on the scale. */
export interface Scale {
  kind: ScaleKind;
  place: (value: number) => number;
  /** Values that the legend names, from the least to the most. */
  ticks: number[];
  format: (value: number) => string;
  /** What the numbers are, with their unit. */
  label: string;
  /** Whether values lie beyond its ends, and have the colours of these. */
  isClipped?: boolean;
}

/** A scale from 0 to `max`, even in the value. */
export function linearScale(label: string, max: number, format: Scale["format"]): Scale {
  const top = max > 0 ? max : 1;
  return { kind: "sequential", place: (v) => v / top, ticks: [0, top / 2, top], format, label };
}

/** A scale of ranks up to `max`: 1, 10, 100 … are equally far apart. */
export function logScale(label: string, max: number, format: Scale["format"]): Scale {
  const decades = Math.log10(Math.max(max, 10));
  const ticks = Array.from({ length: Math.floor(decades) + 1 }, (_, n) => 10 ** n);
  const place = (value: number): number => Math.log10(Math.max(value, 1)) / decades;
  return { kind: "sequential", place, ticks, format, label };
}

/** A scale around 0, with as much room on either side. */
export function divergingScale(label: string, reach: number, format: Scale["format"]): Scale {
  const end = reach > 0 ? reach : 1;
  return { kind: "diverging", place: (v) => v / end, ticks: [-end, 0, end], format, label };
}

/** Above which size a fiftieth of the values lies: a few large ones would leave the rest pale. */
export function findReach(values: readonly (number | null)[]): { reach: number; isClipped: boolean } {
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  const top = sizes.at(-1) ?? 0;
  const most = sizes[Math.floor(0.98 * sizes.length)] ?? top;
  return top > 1.25 * most ? { reach: most, isClipped: true } : { reach: top, isClipped: false };
}

/** Colours of lines and bars that are told apart, never by colour alone: after Okabe and Ito. */
export const SERIES = { light: ["#0068a8", "#b84a00", "#00795a", "#9a4f83", "#6b6660", "#8a6a00"],
  dark: ["#5cb3ee", "#ff9a52", "#3dc79f", "#e59bcb", "#a8a29a", "#e0b73d"] } as const;

export function seriesColour(index: number, isDark: boolean): string {
  const colours = SERIES[isDark ? "dark" : "light"];
  return colours[index % colours.length] as string;
}
