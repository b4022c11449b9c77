/* The floor: a closed loop of streaming completions at next to no cost, to know what the machine can do.
 *
 *   floor_client PORT CONCURRENCY REQUESTS
 *
 * Prints JSON: wall_s, cpu_s, and ttft_ms of every request that was sent after the first CONCURRENCY.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

enum { MAX_FDS = 65536, MAX_EVENTS = 512 };

static struct {
    double sent_at;
    int measured, answered;
} slots[MAX_FDS];

static char prompt[4096];
static int sent, concurrency;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void send_request(int fd) {
    static char body[8192], request[9000];
    int length = snprintf(body, sizeof body,
                          "{\"model\":\"mock-model\",\"prompt\":\"%s Question %d\",\"max_tokens\":16,\"stream\":true}", prompt, sent);
    int n = snprintf(request, sizeof request,
                     "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                     length, body);
    slots[fd].sent_at = now_s();
    slots[fd].measured = sent >= concurrency;
    slots[fd].answered = 0;
    if (send(fd, request, (size_t)n, MSG_NOSIGNAL) != n) {
        perror("send");
        exit(1);
    }
    sent++;
}

static int open_connection(int port) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || fd >= MAX_FDS || connect(fd, (struct sockaddr *)&address, sizeof address)) {
        perror("connect");
        exit(1);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: floor_client PORT CONCURRENCY REQUESTS\n");
        return 2;
    }
    int port = atoi(argv[1]), requests = atoi(argv[3]), ended = 0, poller = epoll_create1(0);
    concurrency = atoi(argv[2]);
    double *ttft_s = malloc(sizeof(double) * (size_t)requests);
    int ttft_count = 0;
    int *fds = malloc(sizeof(int) * (size_t)concurrency);
    for (int i = 0; i < 100; i++) strcat(prompt, "You are a helpful assistant. ");
    for (int i = 0; i < concurrency; i++) {
        fds[i] = open_connection(port);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fds[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, fds[i], &event);
    }
    double begun = now_s();
    for (int i = 0; i < concurrency; i++) send_request(fds[i]);

    struct epoll_event ready[MAX_EVENTS];
    static char data[65536];
    while (ended < requests) {
        int n = epoll_wait(poller, ready, MAX_EVENTS, -1);
        for (int i = 0; i < n; i++) {
            int fd = ready[i].data.fd;
            ssize_t length = recv(fd, data, sizeof data - 1, MSG_DONTWAIT);
            if (length < 0 && errno == EAGAIN) continue;
            if (length <= 0) {
                fprintf(stderr, "the server closed a connection\n");
                return 1;
            }
            data[length] = 0;
            if (!slots[fd].answered && strstr(data, "data: ")) {
                slots[fd].answered = 1;
                if (slots[fd].measured) ttft_s[ttft_count++] = now_s() - slots[fd].sent_at;
            }
            /* This server ends each response in one write, so its last bytes come together. */
            if (length >= 5 && !memcmp(data + length - 5, "0\r\n\r\n", 5)) {
                ended++;
                if (sent < requests) send_request(fd);
            }
        }
    }
    double wall_s = now_s() - begun;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu_s = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    printf("{\"wall_s\":%.4f,\"cpu_s\":%.4f,\"ttft_ms\":[", wall_s, cpu_s);
    for (int i = 0; i < ttft_count; i++) printf("%s%.3f", i ? "," : "", ttft_s[i] * 1e3);
    printf("]}\n");
    return 0;
}
