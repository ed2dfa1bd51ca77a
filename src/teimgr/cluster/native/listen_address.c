/* Preloaded into Ray's processes: a socket that would listen on all addresses listens on one.
 *
 * Ray 2.60 has no setting for the address of its servers. TEIMGR_LISTEN_ADDRESS is a numeric address, IPv4 or IPv6; without
 * it, and for sockets that are bound to an address already, nothing changes. A socket for both families is bound to an
 * IPv4 address in its mapped form.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static const char *const VARIABLE = "TEIMGR_LISTEN_ADDRESS";

/* Write the IPv4 address as one of IPv6. */
static void map(const struct in_addr *from, struct in6_addr *to) {
    memset(to->s6_addr, 0, 10);
    memset(to->s6_addr + 10, 0xff, 2);
    memcpy(to->s6_addr + 12, from, 4);
}

int bind(int descriptor, const struct sockaddr *address, socklen_t length) {
    int (*original)(int, const struct sockaddr *, socklen_t);
    *(void **)&original = dlsym(RTLD_NEXT, "bind");
    if (original == NULL) {
        errno = ENOSYS;
        return -1;
    }
    const char *wanted = getenv(VARIABLE);
    struct in_addr four;
    struct in6_addr six;
    int is_four = wanted != NULL && inet_pton(AF_INET, wanted, &four) == 1;
    int is_six = wanted != NULL && !is_four && inet_pton(AF_INET6, wanted, &six) == 1;
    if (address != NULL && address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in) && is_four) {
        struct sockaddr_in changed;
        memcpy(&changed, address, sizeof changed);
        if (changed.sin_addr.s_addr == htonl(INADDR_ANY)) {
            changed.sin_addr = four;
            return original(descriptor, (const struct sockaddr *)&changed, sizeof changed);
        }
    }
    if (address != NULL && address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6) &&
        (is_four || is_six)) {
        struct sockaddr_in6 changed;
        memcpy(&changed, address, sizeof changed);
        if (IN6_IS_ADDR_UNSPECIFIED(&changed.sin6_addr)) {
            if (is_four) map(&four, &six);
            changed.sin6_addr = six;
            return original(descriptor, (const struct sockaddr *)&changed, sizeof changed);
        }
    }
    return original(descriptor, address, length);
}
