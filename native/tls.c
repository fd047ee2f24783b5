/* Moves the bytes of a TLS connection in batches, without the interpreter's lock: one call per bucket, not per record.
 *
 * The connection is made, verified and owned by Python's ssl, over memory; the functions are those of its OpenSSL. One
 * thread at a time may use a connection. */
#include "tls.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

#define PUBLIC __attribute__((visibility("default")))

enum {
    RECORD = 16 << 10,  /* payload of a full record */
    OVERHEAD = 22,      /* header, type and tag of a record in TLS 1.3 */
    BATCH = 128 << 10,
    WANT_READ = 2,      /* SSL_ERROR_WANT_READ */
    CLOSED = 6,         /* SSL_ERROR_ZERO_RETURN */
    MEMORY = 3          /* BIO_CTRL_INFO: where the bytes of a memory BIO lie */
};

static struct openssl {
    int (*ssl_read)(void *ssl, void *to, int size);
    int (*ssl_write)(void *ssl, const void *from, int size);
    int (*ssl_get_error)(const void *ssl, int result);
    void *(*ssl_get_rbio)(const void *ssl);
    void *(*ssl_get_wbio)(const void *ssl);
    int (*bio_read)(void *bio, void *to, int size);
    int (*bio_write)(void *bio, const void *from, int size);
    long (*bio_ctrl)(void *bio, int command, long number, void *pointer);
    void (*err_clear_error)(void);
} openssl;

PUBLIC void shardline_tls_use(const struct openssl *functions) { openssl = *functions; }

/* Connections that this thread has made since shardline_tls_made(). */
static _Thread_local void *newest;
static _Thread_local int count;

/* For CRYPTO_get_ex_new_index: OpenSSL calls it for each connection that it makes. */
PUBLIC void shardline_tls_on_new(void *ssl, void *value, void *data, int index, long number, void *pointer) {
    (void)value, (void)data, (void)index, (void)number, (void)pointer;
    /* Two threads may both have asked to be told. */
    count += ssl != newest;
    newest = ssl;
}

/* The connection that this thread has made since the last call; NULL if it was not exactly one. */
PUBLIC void *shardline_tls_made(void) {
    void *made = count == 1 ? newest : NULL;
    newest = NULL;
    count = 0;
    return made;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* After a failed call: 0 = try again; otherwise the reason not to. wait_ms: see shardline_tls_receive(). */
static int blocked(int fd, short events, int wait_ms) {
    if (errno != EAGAIN && errno != EWOULDBLOCK)
        return errno;
    if (wait_ms == 0)
        return EAGAIN;
    struct pollfd line = {.fd = fd, .events = events};
    int ready = poll(&line, 1, wait_ms);
    return ready > 0 ? 0 : ready == 0 ? ETIMEDOUT : errno;
}

PUBLIC ptrdiff_t shardline_tls_receive(void *ssl, int fd, unsigned char *to, size_t size, int wait_ms) {
    unsigned char batch[BATCH];
    size_t got = 0;
    int reason = 0;
    openssl.err_clear_error();
    while (got < size && !reason) {
        size_t left = size - got;
        int done = openssl.ssl_read(ssl, to + got, (int)least(left, INT_MAX));
        if (done > 0) {
            got += (size_t)done;
            continue;
        }
        int why = openssl.ssl_get_error(ssl, done);
        if (why == CLOSED) {
            /* Whoever waits for the socket hears of the end too, if it came with the last bytes. */
            shutdown(fd, SHUT_RD);
            break;
        }
        if (why != WANT_READ)
            return -EPROTO;
        /* No more than the memory has room for: the rest would not make the socket readable. */
        size_t wanted = left + (left + RECORD - 1) / RECORD * OVERHEAD;
        ssize_t arrived = recv(fd, batch, least(wanted, BATCH), MSG_DONTWAIT);
        if (arrived == 0)
            break;
        if (arrived < 0)
            reason = blocked(fd, POLLIN, wait_ms);
        else if (openssl.bio_write(openssl.ssl_get_rbio(ssl), batch, (int)arrived) != arrived)
            reason = ENOMEM;
    }
    return got ? (ptrdiff_t)got : -reason;
}

/* Sends what is encrypted. Returns 0 once all has left, otherwise the reason. */
static int flush(void *bio, int fd, int wait_ms) {
    unsigned char sent[RECORD];
    char *rest;
    long size;
    while ((size = openssl.bio_ctrl(bio, MEMORY, 0, &rest)) > 0) {
        ssize_t left = send(fd, rest, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (left < 0) {
            int reason = blocked(fd, POLLOUT, wait_ms);
            if (reason)
                return reason;
            continue;
        }
        /* Reading is the only way to take bytes out of the BIO. */
        for (int done = 1; left > 0 && done > 0; left -= done)
            done = openssl.bio_read(bio, sent, (int)least((size_t)left, sizeof sent));
    }
    return 0;
}

PUBLIC ptrdiff_t shardline_tls_send(void *ssl, int fd, const unsigned char *from, size_t size, size_t *pending,
                                    int wait_ms) {
    void *bio = openssl.ssl_get_wbio(ssl);
    size_t sent = 0;
    openssl.err_clear_error();
    for (;;) {
        int reason = flush(bio, fd, wait_ms);
        if (reason)
            return sent || reason == EAGAIN || reason == EINTR ? (ptrdiff_t)sent : -reason;
        sent += *pending;
        *pending = 0;
        if (sent >= size)
            return (ptrdiff_t)sent;
        while (*pending < BATCH && sent + *pending < size) {
            size_t piece = least(size - sent - *pending, RECORD);
            int done = openssl.ssl_write(ssl, from + sent + *pending, (int)piece);
            if (done <= 0)
                return -EPROTO;
            *pending += (size_t)done;
        }
    }
}
