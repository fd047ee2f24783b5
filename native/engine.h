/* One thread that moves the bytes of many sockets: it receives into memory that was posted and sends what was posted, in
 * the order of the posts, and says what is done. All functions but engine_run() may be called from any thread, and none
 * waits for a socket. Linux only: epoll. */
#ifndef SHARDLINE_ENGINE_H
#define SHARDLINE_ENGINE_H

#include "kernels.h"

#pragma GCC visibility push(default)

struct engine;

/* What became of one post; item 0: of the line itself, which is dead from now on. */
struct engine_done {
    uint64_t line;
    uint64_t item;
    int32_t status; /* one of enum engine_status, or a positive errno */
    int32_t unused;
};

enum engine_status {
    ENGINE_DONE = 0,
    ENGINE_CLOSED = -1,    /* the peer closed the socket */
    ENGINE_STALLED = -2,   /* nothing moved for the line's limit */
    ENGINE_CHANGED = -3,   /* the memory was written to while it was sent */
    ENGINE_DIGEST = -4,    /* of an item that is done: its digest is another */
};

/* NULL where the system has no room for it. */
struct engine *engine_new(const struct kernels *kernels);

/* Move bytes until engine_stop(). Returns an errno where the system refuses to wait for sockets. */
int engine_run(struct engine *engine);

/* End engine_run(). */
void engine_stop(struct engine *engine);

/* After engine_run() has returned. Closes every socket. */
void engine_free(struct engine *engine);

/* A descriptor that is readable while engine_reap() has something to say. */
int engine_bell(const struct engine *engine);

/* Up to `room` reports, the oldest first. */
size_t engine_reap(struct engine *engine, struct engine_done *done, size_t room);

/* The number of a new line, never 0, over a connected stream socket, which belongs to the engine then; 0 where there is
 * no room for it. tls: its connection of ssl (tls.h), which must be there until engine_close(); NULL = none. mark: 0 = the line receives; else it sends, and this byte follows each post. limit_ms: how
 * long it may move nothing while something is posted. */
uint64_t engine_open(struct engine *engine, int socket, void *tls, unsigned char mark, int64_t limit_ms);

/* What engine_post() returns. */
enum engine_answer {
    ENGINE_POSTED = 0,     /* a report will follow */
    ENGINE_DONE_NOW = 1,   /* it was little and is done: no report follows, but one of an earlier item may still wait */
    ENGINE_DIGEST_NOW = 2, /* the same, and its digest is another */
    ENGINE_REFUSED = -1,   /* the line is dead, or is now for want of memory: no report follows but that of its end */
};

/* Receive into, or send, `size` bytes, at least 1, which stay where they are until this item or its line is reported.
 * item: its number in the report, never 0. digest: of what is received, 0 = any. guard, for a line that sends: memory
 * that holds `value` as long as the bytes are what they were; NULL = they can't change. */
int engine_post(struct engine *engine, uint64_t line, uint64_t item, void *memory, size_t size, uint64_t digest,
                const int64_t *guard, int64_t value);

/* Close a line and its socket; when this returns the engine touches none of its memory any more. Reports that were made
 * before may still be reaped. Of a line that is not there: nothing. */
void engine_close(struct engine *engine, uint64_t line);

#pragma GCC visibility pop

#endif
