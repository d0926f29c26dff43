//! The system calls that need raw pointers, behind safe functions: socket options, `sendmmsg`, `recvmmsg`, and the control messages of both.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Messages of one call at most.
pub(crate) const MESSAGES: usize = 32;

/// Sets an integer option.
pub(crate) fn set_option(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    set_option_bytes(fd, level, name, &value.to_ne_bytes())
}

/// Sets an option whose value is bytes.
pub(crate) fn set_option_bytes(
    fd: BorrowedFd<'_>,
    level: i32,
    name: i32,
    value: &[u8],
) -> io::Result<()> {
    // SAFETY: the pointer and length are those of `value`, which the kernel only reads. Options whose value holds pointers have
    // functions of their own.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Reads an integer option.
pub(crate) fn get_option(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which is the size of `value`.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if rc == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// What such a program is made of.
pub(crate) type Filter = libc::sock_filter;

/// An instruction of a classic BPF program.
pub(crate) fn filter(code: u32, jt: u8, jf: u8, k: u32) -> Filter {
    Filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

/// Attaches a classic BPF program with option `name` of `SOL_SOCKET`.
pub(crate) fn attach_filter(fd: BorrowedFd<'_>, name: i32, program: &[Filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: `program` describes a slice that outlives the call; the kernel copies it and does not write.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A socket address as the kernel has it. Aligned for all of them.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct RawAddr {
    bytes: [u8; 32],
    len: u32,
}

impl RawAddr {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        let mut bytes = [0; 32];
        bytes[2..4].copy_from_slice(&addr.port().to_be_bytes());
        let len = match addr {
            SocketAddr::V4(v4) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                16
            }
            SocketAddr::V6(v6) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
                28
            }
        };
        Self { bytes, len }
    }

    /// The address; `None` if it is of another family.
    #[inline]
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        let b = &self.bytes;
        let port = u16::from_be_bytes([b[2], b[3]]);
        match i32::from(u16::from_ne_bytes([b[0], b[1]])) {
            libc::AF_INET => Some(SocketAddr::V4(SocketAddrV4::new(
                Ipv4Addr::new(b[4], b[5], b[6], b[7]),
                port,
            ))),
            libc::AF_INET6 => {
                let mut ip = [0; 16];
                ip.copy_from_slice(&b[8..24]);
                let scope = u32::from_ne_bytes([b[24], b[25], b[26], b[27]]);
                Some(SocketAddr::V6(SocketAddrV6::new(
                    Ipv6Addr::from(ip),
                    port,
                    0,
                    scope,
                )))
            }
            _ => None,
        }
    }
}

/// Control messages: what goes with a datagram beside its bytes. Aligned as the kernel wants it.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct Control {
    bytes: [u8; Self::ROOM],
    len: usize,
}

impl Control {
    /// Enough for all that this crate asks for.
    const ROOM: usize = 192;
    const WORD: usize = size_of::<usize>();
    const HEADER: usize = Self::WORD + 8;

    pub(crate) const fn new() -> Self {
        Self {
            bytes: [0; Self::ROOM],
            len: 0,
        }
    }

    /// Appends a message.
    pub(crate) fn push(&mut self, level: i32, kind: i32, data: &[u8]) {
        let len = Self::HEADER + data.len();
        let end = self.len + len.next_multiple_of(Self::WORD);
        assert!(end <= Self::ROOM, "control messages do not fit");
        let at = &mut self.bytes[self.len..end];
        at[..Self::WORD].copy_from_slice(&len.to_ne_bytes());
        at[Self::WORD..Self::WORD + 4].copy_from_slice(&level.to_ne_bytes());
        at[Self::WORD + 4..Self::HEADER].copy_from_slice(&kind.to_ne_bytes());
        at[Self::HEADER..len].copy_from_slice(data);
        self.len = end;
    }

    /// Appends the source address that a datagram is to have.
    pub(crate) fn push_source(&mut self, source: IpAddr) {
        match source {
            IpAddr::V4(v4) => {
                // struct in_pktinfo: interface, source, unused.
                let mut info = [0; 12];
                info[4..8].copy_from_slice(&v4.octets());
                self.push(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
            }
            IpAddr::V6(v6) => {
                // struct in6_pktinfo: address, interface.
                let mut info = [0; 20];
                info[..16].copy_from_slice(&v6.octets());
                self.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
            }
        }
    }

    /// What the kernel said about a datagram.
    #[inline]
    pub(crate) fn read(&self) -> Info {
        let mut info = Info::default();
        let mut rest = &self.bytes[..self.len.min(Self::ROOM)];
        while rest.len() >= Self::HEADER {
            let mut word = [0; Self::WORD];
            word.copy_from_slice(&rest[..Self::WORD]);
            let len = usize::from_ne_bytes(word);
            let Some(data) = rest.get(Self::HEADER..len) else {
                break;
            };
            let int = |at: usize| {
                let b = &rest[at..at + 4];
                i32::from_ne_bytes([b[0], b[1], b[2], b[3]])
            };
            match (int(Self::WORD), int(Self::WORD + 4), data) {
                (libc::IPPROTO_IP, libc::IP_TOS, [tos, ..]) => info.tos = *tos,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, [a, b, c, d, ..]) => {
                    info.tos = i32::from_ne_bytes([*a, *b, *c, *d]) as u8;
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO, data) if data.len() >= 12 => {
                    // The destination of the header is the third word.
                    info.dst = Some(IpAddr::V4(Ipv4Addr::new(
                        data[8], data[9], data[10], data[11],
                    )));
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, data) if data.len() >= 16 => {
                    let mut ip = [0; 16];
                    ip.copy_from_slice(&data[..16]);
                    info.dst = Some(IpAddr::V6(Ipv6Addr::from(ip)));
                }
                (libc::SOL_UDP, libc::UDP_GRO, [a, b, c, d, ..]) => {
                    info.segment = i32::from_ne_bytes([*a, *b, *c, *d]) as usize;
                }
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL, [a, b, c, d, ..]) => {
                    info.overruns = Some(u32::from_ne_bytes([*a, *b, *c, *d]));
                }
                _ => {}
            }
            rest = rest.get(len.next_multiple_of(Self::WORD)..).unwrap_or(&[]);
        }
        info
    }
}

/// What the kernel said about a datagram that it delivered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Info {
    pub(crate) tos: u8,
    /// Destination address, if asked for.
    pub(crate) dst: Option<IpAddr>,
    /// Bytes of each packet in it; 0: it is one packet.
    pub(crate) segment: usize,
    /// Datagrams that the socket dropped so far, modulo 2^32.
    pub(crate) overruns: Option<u32>,
}

/// Bytes of a datagram, in the order of the wire.
#[derive(Clone, Copy)]
pub(crate) struct Piece<'a> {
    iov: libc::iovec,
    of: PhantomData<&'a [u8]>,
}

impl<'a> Piece<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice is readable for its lifetime.
        unsafe { Self::raw(bytes.as_ptr(), bytes.len()) }
    }

    /// Memory that others may write meanwhile.
    ///
    /// # Safety
    /// `len` bytes from `at` are readable for `'a`.
    pub(crate) unsafe fn raw(at: *const u8, len: usize) -> Self {
        Self {
            iov: libc::iovec {
                iov_base: at.cast_mut().cast(),
                iov_len: len,
            },
            of: PhantomData,
        }
    }
}

/// A datagram to send to an address (or to whom the socket is connected).
pub(crate) struct Message<P> {
    pub(crate) to: Option<RawAddr>,
    pub(crate) pieces: P,
    /// Pieces at most: not more than [`PIECES`].
    pub(crate) count: usize,
    pub(crate) control: Control,
}

/// Pieces of one call at most.
pub(crate) const PIECES: usize = 512;

/// Sends up to [`MESSAGES`] datagrams (fewer, if they are in many pieces) without waiting; how many went.
pub(crate) fn send_messages<'a, P: Iterator<Item = Piece<'a>>>(
    fd: BorrowedFd<'_>,
    source: impl Iterator<Item = Message<P>>,
) -> io::Result<usize> {
    let mut kept = [const { MaybeUninit::<(Option<RawAddr>, Control)>::uninit() }; MESSAGES];
    let mut pieces = [const { MaybeUninit::<libc::iovec>::uninit() }; PIECES];
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MESSAGES];
    let mut rest = &mut pieces[..];
    let mut count = 0;
    for ((kept, header), given) in kept.iter_mut().zip(&mut headers).zip(source) {
        if given.count > rest.len() {
            break;
        }
        let (to, control) = kept.write((given.to, given.control));
        let (own, others) = std::mem::take(&mut rest).split_at_mut(given.count);
        rest = others;
        let mut used = 0;
        for (place, piece) in own.iter_mut().zip(given.pieces) {
            place.write(piece.iov);
            used += 1;
        }
        // SAFETY: all zeroes are a valid msghdr (null pointers, zero lengths).
        let mut h: libc::msghdr = unsafe { std::mem::zeroed() };
        if let Some(to) = to {
            h.msg_name = (&raw const to.bytes).cast_mut().cast();
            h.msg_namelen = to.len;
        }
        h.msg_iov = own.as_mut_ptr().cast();
        h.msg_iovlen = used as _;
        if control.len != 0 {
            h.msg_control = (&raw const control.bytes).cast_mut().cast();
            h.msg_controllen = control.len as _;
        }
        header.write(libc::mmsghdr {
            msg_hdr: h,
            msg_len: 0,
        });
        count += 1;
    }
    // SAFETY: the first `count` headers are written and point to addresses, pieces (as many as were written) and control messages that outlive
    // the call, and the pieces to readable bytes. The kernel reads those and writes `msg_len` of the headers only. A `mmsghdr` begins with its
    // `msghdr`.
    let rc = unsafe {
        let (fd, headers) = (fd.as_raw_fd(), headers.as_mut_ptr());
        if count == 1 {
            // Where there is one, latency counts, and this call has less to do.
            match libc::sendmsg(fd, headers.cast(), libc::MSG_DONTWAIT) {
                ..0 => -1,
                _ => 1,
            }
        } else {
            libc::sendmmsg(fd, headers.cast(), count, libc::MSG_DONTWAIT as _)
        }
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error())
}

/// Sends a datagram to whom the socket is connected, without waiting.
#[inline]
pub(crate) fn send_one(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the pointer and length are those of `bytes`, which the kernel only reads.
    let rc = unsafe {
        libc::send(
            fd.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            libc::MSG_DONTWAIT,
        )
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Receives a datagram without waiting: its length, which may be more than the buffer's.
#[inline]
pub(crate) fn receive_one(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most the length of `buffer`.
    let rc = unsafe {
        libc::recv(
            fd.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            libc::MSG_DONTWAIT | libc::MSG_TRUNC,
        )
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error())
}

/// Datagrams that a socket has dropped for want of room.
pub(crate) fn drops(fd: BorrowedFd<'_>) -> io::Result<u64> {
    // The last of the words that the option has.
    const DROPS: usize = 8;
    let mut words = [0u32; DROPS + 1];
    let mut len = size_of_val(&words) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which is the size of `words`.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            words.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if rc == 0 {
        Ok(words[DROPS].into())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// What arrived in one buffer.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) from: RawAddr,
    pub(crate) control: Control,
    pub(crate) len: usize,
    /// The datagram was longer than the buffer.
    pub(crate) cut: bool,
}

impl Arrival {
    pub(crate) const fn new() -> Self {
        Self {
            from: RawAddr {
                bytes: [0; 32],
                len: 0,
            },
            control: Control::new(),
            len: 0,
            cut: false,
        }
    }
}

/// Receives without waiting, a datagram into each `slot` bytes of `arena`, as many as `arrivals` has room for (and not more than
/// [`MESSAGES`]); how many came.
pub(crate) fn receive_messages(
    fd: BorrowedFd<'_>,
    arena: &mut [u8],
    slot: usize,
    arrivals: &mut [Arrival],
) -> io::Result<usize> {
    let mut pieces = [const { MaybeUninit::<libc::iovec>::uninit() }; MESSAGES];
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MESSAGES];
    let mut count = 0;
    for (((buffer, arrival), piece), header) in arena
        .chunks_exact_mut(slot)
        .zip(arrivals.iter_mut())
        .zip(&mut pieces)
        .zip(&mut headers)
    {
        let piece = piece.write(libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        });
        // SAFETY: all zeroes are a valid msghdr.
        let mut h: libc::msghdr = unsafe { std::mem::zeroed() };
        h.msg_name = (&raw mut arrival.from.bytes).cast();
        h.msg_namelen = arrival.from.bytes.len() as u32;
        h.msg_iov = piece;
        h.msg_iovlen = 1;
        h.msg_control = (&raw mut arrival.control.bytes).cast();
        h.msg_controllen = Control::ROOM as _;
        header.write(libc::mmsghdr {
            msg_hdr: h,
            msg_len: 0,
        });
        count += 1;
    }
    // SAFETY: the first `count` headers are written; each points to a buffer, an address and a control area of its own, with their
    // true sizes, which nothing else uses during the call. A `mmsghdr` begins with its `msghdr`.
    let rc = unsafe {
        let (fd, first) = (fd.as_raw_fd(), headers.as_mut_ptr().cast::<libc::mmsghdr>());
        if count == 1 {
            // As for sending; and an empty socket is looked at most often in this way.
            match libc::recvmsg(fd, first.cast(), libc::MSG_DONTWAIT) {
                ..0 => -1,
                len => {
                    (*first).msg_len = len as u32;
                    1
                }
            }
        } else {
            libc::recvmmsg(
                fd,
                first,
                count,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        }
    };
    let came = usize::try_from(rc).map_err(|_| io::Error::last_os_error())?;
    for (arrival, header) in arrivals.iter_mut().zip(&headers).take(came) {
        // SAFETY: the kernel reports at most the `count` headers that were written above.
        let header = unsafe { header.assume_init_ref() };
        arrival.len = header.msg_len as usize;
        arrival.from.len = header.msg_hdr.msg_namelen;
        arrival.control.len = header.msg_hdr.msg_controllen;
        arrival.cut = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
    }
    Ok(came)
}

/// The record lock of one byte, which belongs to the open file and ends with it.
fn byte_lock(fd: BorrowedFd<'_>, command: i32, kind: i32, at: u64) -> io::Result<libc::flock> {
    // SAFETY: all zeroes are a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = at as _;
    lock.l_len = 1;
    // SAFETY: the commands that this module gives read, or read and write, one `flock`.
    let rc = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) };
    if rc == 0 {
        Ok(lock)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Locks a byte of a file without waiting; `false`: somebody else has it.
pub(crate) fn lock_byte(fd: BorrowedFd<'_>, at: u64) -> io::Result<bool> {
    match byte_lock(fd, libc::F_OFD_SETLK, libc::F_WRLCK, at) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Gives a locked byte back.
pub(crate) fn unlock_byte(fd: BorrowedFd<'_>, at: u64) -> io::Result<()> {
    byte_lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK, at).map(drop)
}

/// Has somebody else locked this byte?
pub(crate) fn byte_is_locked(fd: BorrowedFd<'_>, at: u64) -> io::Result<bool> {
    let lock = byte_lock(fd, libc::F_OFD_GETLK, libc::F_WRLCK, at)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Asks for a property of a network interface (`SIOCGIF…`): the 24 bytes after the name in `struct ifreq`.
pub(crate) fn interface(name: &str, request: u64) -> io::Result<[u8; 24]> {
    if name.is_empty() || name.len() > 15 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let mut question = [0u64; 5];
    for (at, byte) in name.bytes().enumerate() {
        question[at / 8] |= u64::from(byte) << (8 * (at % 8));
    }
    // The shifts above are for little-endian words.
    question = question.map(u64::to_le);
    // SAFETY: `question` is 40 aligned bytes, the size of `struct ifreq`; the requests that this crate makes read and write nothing else.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), request as _, question.as_mut_ptr()) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut answer = [0; 24];
    for (word, bytes) in question[2..].iter().zip(answer.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(answer)
}

/// Name and IP address of each interface that is up, an entry an address.
pub(crate) fn interface_addresses() -> io::Result<Vec<(String, IpAddr)>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call stores a list, which is given back below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut all = Vec::new();
    let mut next = list;
    // SAFETY: until the list is given back, every link is null or a valid element.
    while let Some(one) = unsafe { next.as_ref() } {
        next = one.ifa_next;
        if one.ifa_addr.is_null() || one.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: an address begins with its family.
        let family = i32::from(unsafe { (*one.ifa_addr).sa_family });
        let ip = match family {
            libc::AF_INET => {
                // SAFETY: the family says that it is a sockaddr_in.
                let addr = unsafe { one.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                IpAddr::V4(Ipv4Addr::from(addr.sin_addr.s_addr.to_ne_bytes()))
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that it is a sockaddr_in6.
                let addr = unsafe { one.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                IpAddr::V6(Ipv6Addr::from(addr.sin6_addr.s6_addr))
            }
            _ => continue,
        };
        // SAFETY: names are terminated strings of the list.
        let name = unsafe { std::ffi::CStr::from_ptr(one.ifa_name) };
        all.push((name.to_string_lossy().into_owned(), ip));
    }
    // SAFETY: it came from getifaddrs, and nothing of it is used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(all)
}

/// A socket for whole Ethernet frames of one interface; frames that go out there are not seen.
pub(crate) fn packet_socket(index: u32, program: &[Filter]) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers. Protocol 0: nothing arrives before the filter is in place.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above made it, and nobody else has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    attach_filter(fd.as_fd(), libc::SO_ATTACH_FILTER, program)?;
    set_option(
        fd.as_fd(),
        libc::SOL_PACKET,
        libc::PACKET_IGNORE_OUTGOING,
        1,
    )?;
    // SAFETY: all zeroes are a valid sockaddr_ll.
    let mut addr: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    addr.sll_ifindex = index as i32;
    // SAFETY: the pointer and length are those of `addr`, which the kernel only reads.
    let rc = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const addr).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(fd)
    } else {
        Err(io::Error::last_os_error())
    }
}
