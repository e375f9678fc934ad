// Pairs of texts as people paste them: a pair a line, in one of three forms.
export interface Pair {
  positive: string;
  negative: string;
}

/** Between the two texts of a line; a tab, as from a spreadsheet, is one, too. */
const BETWEEN = " | ";

function readLine(line: string): Pair | null {
  if (line.startsWith("{")) {
    try {
      const { positive, negative } = JSON.parse(line) as Partial<Pair>;
      return typeof positive === "string" && typeof negative === "string" ? { positive, negative } : null;
    } catch {
      return null;
    }
  }
  const parts = line.split(line.includes("\t") ? "\t" : BETWEEN).map((part) => part.trim());
  const [positive, negative] = parts;
  return parts.length === 2 && positive && negative ? { positive, negative } : null;
}

/** The pairs, and the numbers of the lines that are none. */
export function readPairs(text: string): { pairs: Pair[]; wrong: number[] } {
  const pairs: Pair[] = [];
  const wrong: number[] = [];
  text.split("\n").forEach((line, at) => {
    if (line.trim() === "") return;
    const pair = readLine(line.trim());
    if (pair === null) wrong.push(at + 1);
    else pairs.push(pair);
  });
  return { pairs, wrong };
}

export function writePairs(pairs: readonly Pair[]): string {
  return pairs
    .map(({ positive, negative }) =>
      /[\n\t]| \| /.test(positive + negative)
        ? JSON.stringify({ positive, negative })
        : `${positive}${BETWEEN}${negative}`,
    )
    .join("\n");
}
