// A card beside what it is about, wherever there is room on the screen.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";

interface CardProps {
  id: string;
  anchor: HTMLElement | undefined;
  /** Whether it stays, and what it holds can be pressed. */
  isHeld: boolean;
  children: ComponentChildren;
}

const MARGIN = 8;

export function Card({ id, anchor, isHeld, children }: CardProps) {
  const card = useRef<HTMLDivElement>(null);
  const place = useMemo(
    () => (): void => {
      const element = card.current;
      const rect = anchor?.getClientRects()[0];
      if (element === null || rect === undefined) return;
      const { offsetWidth: width, offsetHeight: height } = element;
      const left = Math.min(Math.max(MARGIN, rect.left), innerWidth - width - MARGIN);
      const isBelow = rect.bottom + height + 2 * MARGIN < innerHeight;
      const isAbove = !isBelow && rect.top > height + 2 * MARGIN;
      const top = isAbove ? rect.top - height - MARGIN : rect.bottom + MARGIN;
      element.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    },
    [anchor],
  );
  useLayoutEffect(place);
  useEffect(() => {
    const options = { capture: true, passive: true } as const;
    // It grows when what was looked up arrives.
    const observer = new ResizeObserver(place);
    if (card.current) observer.observe(card.current);
    addEventListener("scroll", place, options);
    addEventListener("resize", place);
    return () => {
      observer.disconnect();
      removeEventListener("scroll", place, options);
      removeEventListener("resize", place);
    };
  }, [place]);
  return (
    <div
      class={`card ${isHeld ? "is-held" : ""}`}
      id={id}
      ref={card}
      role={isHeld ? "dialog" : "tooltip"}
      aria-label={isHeld ? "Token" : undefined}
    >
      {children}
    </div>
  );
}
