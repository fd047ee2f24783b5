// News of the chief: by server-sent events; where those are refused, or don't come through, by asking each second. Both
// with growing pauses while the chief is not there.

const SILENCE_MS = 5000; // The chief speaks twice a second; longer silence is told.
const ASK_MS = 1000;
const LONGEST_PAUSE_MS = 10000;

export class Feed {
  // onView(view), onHistory(news), onContact("live" | "unreached" | "lost" | "over" | "ended", since as Date).
  // unreached: never heard; over: the job has ended, and the chief may still be there; ended: the chief says good-bye.
  constructor({ onView, onHistory, onContact }) {
    Object.assign(this, { onView, onHistory, onContact });
    this.cursor = "";
    this.heard = null;
    this.since = new Date();
    this.pause = ASK_MS;
    this.ended = false;
    this.source = null; // the stream that is listened to
    this.opened = null;
    this.deaf = false; // streams don't come through
    this.watch = setInterval(() => this.look(), 500);
    this.listen();
  }

  listen() {
    const source = new EventSource(`api/stream?since=${encodeURIComponent(this.cursor)}`);
    this.source = source;
    this.opened = new Date();
    source.addEventListener("view", (event) => this.viewed(JSON.parse(event.data)));
    source.addEventListener("history", (event) => this.changed(JSON.parse(event.data)));
    source.addEventListener("end", () => {
      this.hangUp();
      this.ended = true;
      this.onContact("ended", this.heard);
      this.later(() => this.listen());
    });
    source.onerror = () => {
      // The browser would come again by itself, but at its own pace and without the cursor.
      this.hangUp();
      this.look();
      this.ask();
    };
  }

  hangUp() {
    this.source?.close();
    this.source = null;
  }

  // Says what is wrong with the stream: no chief, no token, or too many readers; then a view is there all the same.
  async ask() {
    try {
      const options = { signal: AbortSignal.timeout(SILENCE_MS) };
      const answer = await fetch("api/view", options);
      if (answer.status === 401) {
        location.reload();
        return;
      }
      if (!answer.ok) throw new Error(`the chief answered ${answer.status}`);
      this.viewed(await answer.json());
      const news = await fetch(`api/history?since=${encodeURIComponent(this.cursor)}`, options);
      if (news.ok) this.changed(await news.json());
      this.pause = ASK_MS;
      setTimeout(() => (this.deaf ? this.ask() : this.listen()), ASK_MS);
    } catch {
      this.deaf = false;
      // Nobody answers at all: that needs no long watch.
      this.look(ASK_MS);
      this.later(() => this.listen());
    }
  }

  later(what) {
    setTimeout(what, this.pause);
    this.pause = Math.min(LONGEST_PAUSE_MS, this.pause * 1.6);
  }

  viewed(view) {
    this.heard = new Date();
    this.pause = ASK_MS;
    this.ended = view.phase === "ended";
    this.onView(view);
    this.onContact(this.ended ? "over" : "live", this.heard);
  }

  changed(news) {
    this.cursor = news.cursor;
    this.onHistory(news);
  }

  look(limit = SILENCE_MS) {
    const since = this.heard ?? this.since;
    if (!this.ended && Date.now() - since > limit) this.onContact(this.heard ? "lost" : "unreached", since);
    // An open stream that says nothing: the chief stands still, or something on the way keeps the stream to itself.
    if (this.source && Date.now() - Math.max(since, this.opened) > SILENCE_MS) {
      this.hangUp();
      this.deaf = true;
      this.ask();
    }
  }
}
