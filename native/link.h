/* One socket that carries frames in both directions: a state machine that moves what can be moved without waiting, into
 * memory that was posted and out of memory that was queued. One thread at a time may use a link.
 *
 * A frame on the wire: its kind (1 byte), 3 zeros, the bytes of its body (4) and of its payload (8), little-endian; the
 * body; the payload; and, if there is a payload, one byte that says that nothing overwrote it while it was sent. */
#ifndef SHARDLINE_LINK_H
#define SHARDLINE_LINK_H

#include "kernels.h"

#pragma GCC visibility push(default)

enum link_state {
    LINK_IDLE = 0,   /* all has been moved that could be: wait for the socket */
    LINK_FRAME = 1,  /* a frame has come; link_take() before the next one */
    LINK_HUNGRY = 2, /* payload is due, and no memory is posted for it */
    LINK_TURN = 3,   /* others have their turn; call again */
    LINK_DEAD = 4,   /* `status` says why */
    LINK_LATE = 5,   /* of link_wait(): the time is over */
    LINK_BELL = 6,   /* of link_wait(): the bell has rung */
    LINK_MOVED = 7,  /* of link_wait(): one of the counts has changed */
};

enum link_status {
    LINK_CLOSED = -1,    /* the peer closed the socket */
    LINK_CHANGED = -2,   /* the memory was written to while it was sent */
    LINK_MALFORMED = -3, /* what came is no frame, or one whose body is too long */
    LINK_MISFIT = -4,    /* more memory was posted than the frame has payload */
};

/* What the owner of a link may read at any time. */
struct link_face {
    uint64_t got;     /* posted pieces that are whole, since the beginning */
    uint64_t whole;   /* payloads that have come whole */
    uint64_t sent;    /* frames that have left */
    uint64_t moved;   /* bytes, in both directions */
    uint64_t payload; /* bytes behind the frame that has come */
    const unsigned char *body;
    uint32_t body_size;
    uint32_t kind;
    int32_t status;   /* of a dead link: one of enum link_status, or a positive errno */
    int32_t sending;  /* something waits for room in the socket */
    uint8_t wrong[256]; /* of the piece with this number modulo 256: its digest is another */
};

/* A piece of payload to send. guard: memory that holds `value` as long as the bytes are what they were; NULL = they can't
 * change. */
struct link_part {
    const unsigned char *at;
    size_t size;
    const int64_t *guard;
    int64_t value;
};

struct link;

/* Over a connected stream socket, which stays the caller's. tls: its connection of ssl (tls.h), or NULL. most: bytes of a
 * body that may come. NULL where there is no room for it. */
struct link *link_new(const struct kernels *kernels, int socket, void *tls, uint32_t most);
void link_free(struct link *link);
struct link_face *link_face(struct link *link);

/* Receive the next `size` bytes of payload, at least 1, into this memory, which stays where it is until they are whole;
 * NULL = drop them. At most 256 pieces may be posted. digest: of the bytes, 0 = any. Returns 0, or a link_status. */
int link_expect(struct link *link, void *memory, size_t size, uint64_t digest);

/* Queue a frame. The body is copied, and so are payloads of few bytes altogether; others stay where they are until the
 * frame has left. Returns 0, or a link_status of a link that is dead now. What is little is sent at once. */
int link_send(struct link *link, int kind, const void *body, size_t size, const struct link_part *parts, size_t count);

/* The frame that has come is taken, and its body may be overwritten. */
void link_take(struct link *link);

/* Move what can be moved. Returns a link_state. ready: bytes may have come since the last call. */
int link_move(struct link *link, int ready);

/* The same, waiting up to wait_ms for something to happen, or until another thread writes to `bell`, an eventfd. */
int link_wait(struct link *link, int bell, int wait_ms);

#pragma GCC visibility pop

#endif
