import { createHash } from "node:crypto";
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";

const ROOT = fileURLToPath(new URL(".", import.meta.url));
const BESIDE_SOURCE = [
  "build/api-paths.json",
  "build/types.mjs",
  "index.html",
  "package-lock.json",
  "package.json",
  "tsconfig.json",
  "vite.config.ts",
];

/** The digest of everything that the page is built from; tests/server/test_playground.py has it, too. */
function digestSources(): string {
  const source = readdirSync(`${ROOT}src`, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => `${entry.parentPath}/${entry.name}`.slice(ROOT.length).replaceAll("\\", "/"));
  const digest = createHash("sha256");
  for (const name of [...BESIDE_SOURCE, ...source].sort()) {
    const content = readFileSync(`${ROOT}${name}`);
    digest.update(`${name} ${content.length}\n`).update(content);
  }
  return digest.digest("hex");
}

interface Lock {
  packages: Record<string, { dev?: boolean; optional?: boolean; version?: string }>;
}

/** The licences of the packages whose code or type the page holds: each asks to be sent along. */
function readLicenses(): string {
  const lock = JSON.parse(readFileSync(`${ROOT}package-lock.json`, "utf8")) as Lock;
  const parts = Object.entries(lock.packages)
    .filter(([path, { dev }]) => path !== "" && !dev)
    .map(([path, { version }]) => {
      const file = ["LICENSE", "LICENSE.md", "LICENSE.txt"]
        .map((name) => `${ROOT}${path}/${name}`)
        .find((name) => existsSync(name));
      if (file === undefined) throw new Error(`${path} comes without a licence`);
      const name = path.replace("node_modules/", "");
      return `${name} ${version}\n\n${readFileSync(file, "utf8").trim()}\n`;
    });
  return parts.join(`\n${"-".repeat(78)}\n\n`);
}

/** Put the script and the style sheet into the page itself, and say what it was built from. */
function singleFile(): Plugin {
  return {
    name: "single-file",
    enforce: "post",
    generateBundle(_options, bundle) {
      const page = bundle["index.html"];
      if (page?.type !== "asset") throw new Error("there is no index.html among the output");
      let html = String(page.source);
      for (const [name, output] of Object.entries(bundle)) {
        if (output === page) continue;
        const isScript = output.type === "chunk";
        const text = (isScript ? output.code : String(output.source)).trim();
        const tag = isScript
          ? new RegExp(`\\s*<script[^>]*src="[^"]*${name}"[^>]*></script>`)
          : new RegExp(`\\s*<link[^>]*href="[^"]*${name}"[^>]*>`);
        if (!tag.test(html)) throw new Error(`nothing in the page names ${name}`);
        html = html.replace(tag, "");
        html = isScript
          ? html.replace("</body>", () => `<script type="module">${text.replaceAll("</script", "<\\/script")}</script>\n  </body>`)
          : html.replace("</head>", () => `<style>${text}</style>\n  </head>`);
        delete bundle[name];
      }
      page.source = html.replace("SOURCES", digestSources());
      this.emitFile({ type: "asset", fileName: "licenses.txt", source: readLicenses() });
    },
  };
}

export default defineConfig({
  plugins: [singleFile()],
  build: {
    outDir: "../logsteer_server/playground",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: Number.MAX_SAFE_INTEGER,
  },
  server: { proxy: { "^/(?!src|@|node_modules|index.html|$)": "http://127.0.0.1:8000" } },
});
