// What the mock engine and the load generator share: sockets, clocks, growing buffers, and as much HTTP as they need.
#pragma once

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    char *data;
    size_t used, room;
} Buffer;

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline void append(Buffer *buffer, const char *data, size_t size) {
    if (buffer->used + size > buffer->room) {
        buffer->room = (buffer->used + size) * 2;
        buffer->data = realloc(buffer->data, buffer->room);
        if (!buffer->data) die("realloc");
    }
    memcpy(buffer->data + buffer->used, data, size);
    buffer->used += size;
}

static inline void drop(Buffer *buffer, size_t size) {
    buffer->used -= size;
    memmove(buffer->data, buffer->data + size, buffer->used);
    if (!buffer->used && buffer->room > 65536) {
        free(buffer->data);
        *buffer = (Buffer){0};
    }
}

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void ready_socket(int fd) {
    int on = 1;
    if (fcntl(fd, F_SETFL, O_NONBLOCK) < 0) die("fcntl");
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0) die("TCP_NODELAY");
}

static inline struct sockaddr_in local(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

// As many open files as the kernel grants.
static inline void raise_file_limit(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

// Length of a head with its empty line; 0 while it is not complete.
static inline size_t head_length(const char *data, size_t size) {
    const char *end = memmem(data, size, "\r\n\r\n", 4);
    return end ? (size_t)(end - data) + 4 : 0;
}

// The value of a header ("name:", lower case) in a complete head; NULL where it is missing.
static inline const char *header(const char *head, size_t size, const char *name) {
    size_t length = strlen(name);
    const char *end = head + size;
    for (const char *line = memchr(head, '\n', size); line && line + 1 + length < end;
         line = memchr(line + 1, '\n', (size_t)(end - line - 1))) {
        if (strncasecmp(line + 1, name, length)) continue;
        const char *value = line + 1 + length;
        while (*value == ' ') value++;
        return value;
    }
    return NULL;
}
