// A text as its tokens, coloured by a column of numbers.
//
// The tokens are made by hand, not by the framework: 5,000 of them appear, and change colour, at
// once. Hover, tap or the arrow keys choose one, whose card says more; a click or Enter holds it.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count } from "../lib/format";
import { colourAt, type Scale } from "../lib/scales";
import { isDark } from "../lib/theme";
import { Card } from "./Card";
import { Legend } from "./Legend";

export interface TokenTextProps {
  /** What the text is, for those who do not see it. */
  label: string;
  tokens: readonly string[];
  /** A number for each token; null leaves a token without colour. */
  values?: readonly (number | null)[];
  scale?: Scale;
  /** What the card of a token says; there is no card without it. */
  describe?: (index: number, isHeld: boolean) => ComponentChildren;
  /** Called with the token that is looked at, and with null once none is. */
  onActive?: (index: number | null) => void;
  /** A token that is marked from outside, such as the same one in the text beside this. */
  marked?: number | null;
  /** Leave out the legend, where one stands for several texts. */
  noLegend?: boolean;
}

/** Tokens that are shown: each is an element of the page. */
const MAX_SHOWN = 20_000;

export function TokenText(props: TokenTextProps) {
  const { label, tokens: given, values, scale, describe, onActive, marked = null, noLegend } = props;
  const tokens = useMemo(() => given.slice(0, MAX_SHOWN), [given]);
  const id = useId();
  const box = useRef<HTMLDivElement>(null);
  const spans = useRef<HTMLElement[]>([]);
  const [active, setActive] = useState<number | null>(null);
  const [isHeld, setHeld] = useState(false);
  const whole = useRef<HTMLDivElement>(null);
  const dark = isDark.value;

  useLayoutEffect(() => {
    const fragment = document.createDocumentFragment();
    spans.current = tokens.map((token, index) => {
      const span = document.createElement("span");
      span.className = "token";
      span.id = `${id}-${index}`;
      span.setAttribute("role", "option");
      span.dataset.index = String(index);
      writeToken(span, token);
      fragment.append(span);
      return span;
    });
    box.current?.replaceChildren(fragment);
    setActive(null);
    setHeld(false);
  }, [tokens, id]);

  useLayoutEffect(() => {
    spans.current.forEach((span, index) => {
      const place = scale && values ? placeOf(scale, tokens, values, index) : null;
      span.style.backgroundColor = scale && place !== null ? colourAt(scale.kind, place, dark) : "";
    });
  }, [tokens, values, scale, dark]);

  const shown = active ?? marked;
  useLayoutEffect(() => {
    const span = shown === null ? undefined : spans.current[shown];
    span?.classList.add("is-active");
    span?.setAttribute("aria-selected", "true");
    return () => {
      span?.classList.remove("is-active");
      span?.removeAttribute("aria-selected");
    };
  }, [shown, tokens]);

  const choose = (index: number | null): void => {
    if (index === null) setHeld(false);
    if (index === active) return;
    setActive(index);
    onActive?.(index);
  };
  useEffect(() => {
    if (!isHeld) return undefined;
    const release = (event: Event): void => {
      if (event instanceof KeyboardEvent ? event.key === "Escape" : !whole.current?.contains(event.target as Node)) {
        choose(null);
        if (event instanceof KeyboardEvent) box.current?.focus();
      }
    };
    addEventListener("pointerdown", release);
    addEventListener("keydown", release);
    return () => {
      removeEventListener("pointerdown", release);
      removeEventListener("keydown", release);
    };
  }, [isHeld]);
  const indexAt = (target: EventTarget | null): number | null => {
    const span = target instanceof Element ? target.closest<HTMLElement>(".token") : null;
    return span?.dataset.index === undefined ? null : Number(span.dataset.index);
  };

  const move = (event: KeyboardEvent): void => {
    const last = tokens.length - 1;
    const from = active ?? 0;
    const next = {
      ArrowRight: () => from + 1,
      ArrowLeft: () => from - 1,
      ArrowDown: () => findLine(spans.current, from, 1),
      ArrowUp: () => findLine(spans.current, from, -1),
      Home: () => 0,
      End: () => last,
    }[event.key];
    if (event.key === "Escape") choose(null);
    if (event.key === "Enter" && active !== null && !event.ctrlKey && !event.metaKey) setHeld(true);
    if (next === undefined) return;
    event.preventDefault();
    const index = Math.min(last, Math.max(0, next()));
    choose(index);
    spans.current[index]?.scrollIntoView({ block: "nearest" });
  };

  return (
    <div class="token-text" ref={whole}>
      {scale && !noLegend && <Legend scale={scale} />}
      <div
        ref={box}
        class="tokens"
        role="listbox"
        dir="auto"
        tabIndex={0}
        aria-label={label}
        aria-activedescendant={active === null ? undefined : `${id}-${active}`}
        aria-describedby={active === null ? undefined : `${id}-card`}
        onPointerOver={(event) => {
          const index = indexAt(event.target);
          if (index !== null && !isHeld) choose(index);
        }}
        onPointerLeave={(event) => {
          if (event.pointerType === "mouse" && !isHeld) choose(null);
        }}
        onClick={(event) => {
          const index = indexAt(event.target);
          if (index === null || !describe || !getSelection()?.isCollapsed) return;
          setHeld(!(isHeld && index === active));
          choose(index);
        }}
        onKeyDown={move}
        onFocus={(event) => {
          if (event.currentTarget.matches(":focus-visible")) choose(active ?? 0);
        }}
        onBlur={() => {
          if (!isHeld) choose(null);
        }}
        onCopy={(event) => {
          event.preventDefault();
          const chosen = String(getSelection()).replaceAll("\u00a0", " ");
          event.clipboardData?.setData("text/plain", chosen);
        }}
      />
      {given.length > MAX_SHOWN && (
        <p class="hint">
          The first {count(MAX_SHOWN)} of {count(given.length)} tokens are shown; sums are of all.
        </p>
      )}
      {describe && active !== null && active < tokens.length && (
        <Card id={`${id}-card`} anchor={spans.current[active]} isHeld={isHeld}>
          {describe(active, isHeld)}
        </Card>
      )}
    </div>
  );
}

/** Where a token is on its scale; a character of several tokens is where the strongest of them is. */
function placeOf(scale: Scale, tokens: readonly string[], values: readonly (number | null)[], index: number): number | null {
  let strongest: number | null = null;
  for (let at = index; at === index || tokens[at] === ""; at += 1) {
    const value = values[at];
    const place = value === null || value === undefined ? null : scale.place(value);
    if (place !== null && Math.abs(place) >= Math.abs(strongest ?? 0)) strongest = place;
  }
  return strongest;
}

/**
 * Write a token so that its white space can be seen, and lines end where it ends them.
 *
 * A line may break before a token, and not between its first space and its word: the space
 * would else hang, coloured, at the end of the line before.
 */
function writeToken(span: HTMLElement, given: string): void {
  const token = given.replace(/^ +/, (spaces) => "\u00a0".repeat(spaces.length));
  if (token !== given) span.append(document.createElement("wbr"));
  if (!/[\n\t\r]/.test(token)) {
    span.append(token);
    return;
  }
  for (const part of token.split(/(\n|\t|\r)/)) {
    if (part === "") continue;
    const mark = { "\n": "↵", "\t": "⇥", "\r": "␍" }[part];
    if (mark === undefined) span.append(part);
    else {
      const unseen = document.createElement("i");
      unseen.className = "unseen";
      unseen.textContent = mark;
      span.append(unseen);
      if (part === "\n") span.append(document.createElement("br"));
    }
  }
}

/** The token above or below: the nearest one of the next line. */
function findLine(spans: HTMLElement[], from: number, step: 1 | -1): number {
  const start = spans[from];
  if (start === undefined) return from;
  const { left, top } = start.getBoundingClientRect();
  let best = from;
  let distance = Infinity;
  let line: number | null = null;
  for (let index = from + step; index >= 0 && index < spans.length; index += step) {
    const box = (spans[index] as HTMLElement).getBoundingClientRect();
    if (Math.abs(box.top - top) < 4) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 4) break;
    if (Math.abs(box.left - left) < distance) {
      distance = Math.abs(box.left - left);
      best = index;
    }
  }
  return best;
}
