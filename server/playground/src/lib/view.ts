// What a view is: a tab of the page, with its state in the address.
import type { ComponentType } from "preact";
import type { IconName } from "../parts/Icon";
import type { Fields } from "./address";
import type { ModelCard } from "./api";

export interface ViewProps<S extends Fields, R = never> {
  state: S;
  /** Change some fields; they go into the address at once. */
  setState: (change: Partial<S>) => void;
  /** The model that is asked; null until the server has said which there are. */
  model: ModelCard | null;
  models: readonly ModelCard[];
  /** Whether the view can be seen: hidden views keep their state. */
  isShown: boolean;
  /** What is shown of the last request; null: nothing yet. */
  result: R | null;
  /** Show a result; with what asked for it, it is whole, and kept among the sessions. */
  onResult: (result: R, asked?: { fields: S; title: string }) => void;
  /** Whether the result was opened from a session: nothing runs by itself until the form changes. */
  isKept: boolean;
  /** Whether the form asks for something else by now. */
  isStale: boolean;
}

/** How a result is shown: beside its form, and beside another one of the sessions. */
export interface OutcomeProps<S extends Fields, R> {
  result: R;
  state: S;
  setState: (change: Partial<S>) => void;
}

export interface View<S extends Fields, R = never> {
  /** Its name in the address. */
  id: string;
  title: string;
  icon: IconName;
  /** What the view is for, in one sentence. */
  lead: string;
  /** A good example on the demo model. Fields that differ from it are written into the address. */
  initial: S;
  component: ComponentType<ViewProps<S, R>>;
  /** The part of the form that its request is made of; without it results never become stale. */
  asks?: (fields: S) => unknown;
  /** Shows a result without its form; without it results are not kept. */
  outcome?: ComponentType<OutcomeProps<S, R>>;
}

/** A view as the page holds it, whatever its state is. */
export type AnyView = View<Fields, unknown>;

/** Make a view of its parts; each kind of state is known only inside its view. */
export function view<S extends Fields, R = never>(parts: View<S, R>): AnyView {
  return parts as unknown as AnyView;
}
