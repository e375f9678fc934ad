import { render } from "preact";
import { App } from "./app";
import { watchModels } from "./lib/models";
import "./style.css";

const root = document.getElementById("app");
if (root === null) throw new Error("the page has no #app");
render(<App />, root);
void watchModels();
