"""HTTP/1.1 and HTTP/2 servers: sockets, limits of connections and bodies, authentication."""
