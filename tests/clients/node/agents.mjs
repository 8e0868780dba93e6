// The features of coding agents that run as commands.

import { spawn } from "node:child_process";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import http from "node:http";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import * as m from "./features.mjs";

const BIN = join(dirname(fileURLToPath(import.meta.url)), "..", "node_modules", ".bin");
// Messages that agents print instead of a status.
const MEANINGS = [
  [/does not exist/, 404],
  [/at capacity/, 503],
];

// Forward requests to the platform. Return the server's URL, and a promise of the beginning of an answer to the script.
async function forwarder(name) {
  let begun;
  const answering = new Promise((resolve) => (begun = resolve));
  const server = http.createServer((request, response) => {
    const pieces = [];
    request.on("data", (piece) => pieces.push(piece));
    request.on("end", () => {
      const body = Buffer.concat(pieces);
      const options = { method: request.method, headers: { ...request.headers, "content-length": body.length } };
      delete options.headers["transfer-encoding"];
      const upstream = http.request(m.URL + request.url, options, (answer) => {
        response.writeHead(answer.statusCode, answer.headers);
        answer.pipe(response);
        answer.on("error", () => response.destroy());
        if (body.includes(`[[${name}]]`)) answer.once("data", begun);
      });
      upstream.on("error", () => response.destroy());
      response.on("close", () => upstream.destroy());
      upstream.end(body);
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, answering };
}

// Return the lines that a command of this environment prints. It ends with an error if the command fails.
export function lines(command, args, environ, { killAfter } = {}) {
  return new Promise((resolve, reject) => {
    const PATH = `${dirname(process.execPath)}:${process.env.PATH}`;
    const options = { env: { ...process.env, PATH, ...environ }, stdio: ["ignore", "pipe", "pipe"], detached: true };
    const child = spawn(join(BIN, command), args, options);
    let output = "";
    child.stdout.on("data", (data) => (output += data));
    child.stderr.on("data", (data) => (output += data));
    killAfter?.then(() => process.kill(-child.pid, "SIGTERM")); // some agents start a process that sends the requests
    child.on("error", reject);
    child.on("close", (code) => {
      if (code === 0 || killAfter) return resolve(output.split("\n"));
      const error = new Error(output.slice(-3000));
      const status = /\b(400|401|404|429|503|529)\b/.exec(output)?.[1];
      error.status = status ? Number(status) : MEANINGS.find(([meaning]) => meaning.test(output))?.[1];
      reject(error);
    });
  });
}

// `ask` takes a prompt, and optionally a key, a model, the platform's URL and options of `lines`. It returns the answer's text.
// `scripts` are the names of the scripts for one call and for two. The first call writes 42 to the file `number`.
export function agentFeatures(ask, scripts, statuses) {
  const stream = async () => m.equal(await ask(m.script("plain")), "Paris is the capital of France.");

  async function tools() {
    rmSync("number", { force: true });
    m.equal(await ask(m.script(scripts[0])), "It is sunny in Paris.");
    m.equal(readFileSync("number", "utf8"), "42\n");
  }

  async function parallel() {
    writeFileSync("one", "sunny\n");
    writeFileSync("two", "rainy\n");
    m.equal(await ask(m.script(scripts[1])), "It is sunny in Paris and in Rome.");
  }

  async function abort() {
    const { url, answering } = await forwarder("long");
    await ask(m.script("long"), { url, killAfter: answering });
  }

  const call = ({ key, model, prompt }) => ask(prompt, { key, model });
  const errors = Object.entries(m.errors(call)).filter(([name]) => statuses.includes(name));
  return { stream, tools, "parallel tools": parallel, ...Object.fromEntries(errors), abort };
}
