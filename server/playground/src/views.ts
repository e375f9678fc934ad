// The views, in the order of their tabs.
import { choices } from "./views/choices";
import { examples } from "./views/examples";
import { inside } from "./views/inside";
import { models } from "./views/models";
import { makeSessions } from "./views/sessions";
import { steer } from "./views/steer";
import { sweep } from "./views/sweep";
import { text } from "./views/text";
import { vectors } from "./views/vectors";

const ASKING = [text, choices, steer, sweep, inside, examples, vectors, models];

export const VIEWS = [...ASKING, makeSessions(ASKING)];
