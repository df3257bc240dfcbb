// SPDX-License-Identifier: Apache-2.0
// One action at a time, which its Stop button aborts.

/** Actions of a form. While one runs, others are ignored. */
export class Action {
  /** `show(isRunning)` is called around each action, `fail(error)` for its error, `stopped()` for an abort. */
  constructor({ show, fail, stopped }) {
    this.show = show;
    this.fail = fail;
    this.stopped = stopped;
    this.running = null;
  }

  get isRunning() {
    return this.running !== null;
  }

  /** Runs `action(signal)` to its end. */
  async run(action) {
    if (this.isRunning) return;
    this.running = new AbortController();
    this.show(true);
    try {
      await action(this.running.signal);
    } catch (error) {
      if (error.name === "AbortError") this.stopped();
      else this.fail(error);
    } finally {
      this.running = null;
      this.show(false);
    }
  }

  stop() {
    this.running?.abort();
  }
}
