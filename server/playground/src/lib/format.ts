// Numbers and tokens as people read them.

/** Three significant digits; a true minus sign; a dash for what is no number. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text =
    size >= 1e6 || size < 10 ** -digits
      ? value.toExponential(digits - 1).replace("e+", "e").replace(/\.?0+e/, "e")
      : size >= 10 ** (digits - 1)
        ? value.toLocaleString("en", { maximumFractionDigits: size >= 1000 ? 0 : 1 })
        : value.toPrecision(digits);
  return text.replace("-", "−");
}

/** A number of an axis or a legend: as short as it may be. */
export function tick(value: number): string {
  return number(value, 4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** A number with a fixed count of decimals, and a true minus sign. */
export function fixed(value: number | null | undefined, decimals = 2): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = value.toFixed(decimals);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

/** A difference, always with its sign. */
export function signed(value: number | null | undefined, decimals = 2): string {
  const text = fixed(value, decimals);
  return value !== null && value !== undefined && value > 0 ? `+${text}` : text;
}

export function count(value: number): string {
  return value.toLocaleString("en");
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  if (value >= 99.95) return value < 100 ? ">99.9 %" : "100 %";
  if (value < 0.001 && value > 0) return "<0.001 %";
  return `${value >= 10 ? value.toFixed(1) : value >= 0.01 ? value.toPrecision(2) : value.toPrecision(1)} %`;
}

export function bytes(value: number): string {
  if (value < 1024) return `${value} bytes`;
  if (value < 2 ** 20) return `${(value / 1024).toFixed(1)} KiB`;
  return `${(value / 2 ** 20).toFixed(1)} MiB`;
}

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** A token with what cannot be seen made visible: spaces, line ends, tabs, parts of characters. */
export function visible(token: string): string {
  if (token === "") return "·";
  return token
    .replace(/ /g, "␣")
    .replace(/\n/g, "↵")
    .replace(/\r/g, "␍")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f\u200b-\u200f\ufeff]/g, "·");
}

/** A number without zeros at its end, as axes and chosen values have it. */
export function short(value: number): string {
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** A share with its 95 % interval after Wilson, as in `75.0 %, 47 to 91`. */
export function interval(right: number, all: number): string {
  const z = 1.96;
  const share = right / all;
  const middle = (share + (z * z) / (2 * all)) / (1 + (z * z) / all);
  const half = (z / (1 + (z * z) / all)) * Math.sqrt((share * (1 - share)) / all + (z * z) / (4 * all * all));
  return `${(100 * (middle - half)).toFixed(0)} to ${(100 * (middle + half)).toFixed(0)} %`;
}
