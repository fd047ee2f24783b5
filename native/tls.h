/* TLS over a connection of Python's ssl; one thread at a time may use it. */
#ifndef SHARDLINE_TLS_H
#define SHARDLINE_TLS_H

#include <stddef.h>

/* Fill the memory with what has arrived. wait_ms: how long to wait each time that nothing has; 0 = not, -1 = forever.
 *
 * Returns the number of bytes, 0 if the connection was closed, or as -errno why nothing has come: -EAGAIN if it does not
 * wait, -ETIMEDOUT if it waited in vain, -EPROTO: OpenSSL's queue of errors has the reason. */
ptrdiff_t shardline_tls_receive(void *ssl, int fd, unsigned char *to, size_t size, int wait_ms);

/* Encrypt and send. pending: bytes of `from` that are encrypted and of which not all has left, for the next call, which
 * must be given what this one has not sent. wait_ms: see shardline_tls_receive().
 *
 * Returns the number of bytes that have left, 0 if there is no room, or the reason as -errno; -EPROTO: as above. */
ptrdiff_t shardline_tls_send(void *ssl, int fd, const unsigned char *from, size_t size, size_t *pending, int wait_ms);

#endif
