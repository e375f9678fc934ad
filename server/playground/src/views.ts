// The views, in the order of their tabs.
import { choices } from "./views/choices";
import { long } from "./views/long";
import { models } from "./views/models";
import { steer } from "./views/steer";
import { sweep } from "./views/sweep";
import { text } from "./views/text";
import { vectors } from "./views/vectors";

export const VIEWS = [text, choices, long, steer, sweep, vectors, models];
