// What a view is: a tab of the page, with its state in the address.
import type { ComponentType } from "preact";
import type { IconName } from "../parts/Icon";
import type { Fields } from "./address";
import type { ModelCard } from "./api";

export interface ViewProps<S extends Fields> {
  state: S;
  /** Change some fields; they go into the address at once. */
  setState: (change: Partial<S>) => void;
  /** The model that is asked; null until the server has said which there are. */
  model: ModelCard | null;
  models: readonly ModelCard[];
  /** Whether the view can be seen: views stay as they are behind the others. */
  isShown: boolean;
}

export interface View<S extends Fields> {
  /** Its name in the address. */
  id: string;
  title: string;
  icon: IconName;
  /** What the view is for, in one sentence. */
  lead: string;
  /** A good example on the demo model. Fields that differ from it are written into the address. */
  initial: S;
  component: ComponentType<ViewProps<S>>;
}

/** A view as the page holds it, whatever its state is. */
export type AnyView = View<Fields>;

/** Make a view of its parts; each kind of state is known only inside its view. */
export function view<S extends Fields>(parts: View<S>): AnyView {
  return parts as unknown as AnyView;
}
