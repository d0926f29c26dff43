//! Ranks that find each other: a place to meet, who presides, who attends.
//!
//! [`Bootstrap::join`] does it all where everybody knows the place and the ranks from the start. A [`Meeting`] is for those who learn
//! their rank later: each opens one, all tell each other where, and then the first rank's is the one that counts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::conn::{Conn, wait};
use super::exchange::expect;
use super::frame::{Frame, Kind, Stream};
use super::place::{Listener, Unknown, connect_once};
use super::{Bootstrap, BootstrapError, GRACE, Rendezvous, Result, Role, fail_all, with_context};

/// Bytes of a secret at most.
pub const MAX_SECRET: usize = 32;
/// A greeting is small; who has not been let in may not make us allocate more.
const MAX_HELLO: usize = 4 + MAX_SECRET;
/// Connections at a time that have not said who they are.
const GUESTS: usize = 64;
/// Pause between attempts to accept or to connect.
const RETRY: Duration = Duration::from_millis(2);
/// So often one after the other a place that was open has to be found closed.
const CLOSED: u32 = 3;

/// Places at which somebody listens already.
pub struct Meeting {
    listeners: Vec<Listener>,
    addresses: Vec<Rendezvous>,
}

impl std::fmt::Debug for Meeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Meeting").field(&self.addresses).finish()
    }
}

impl Meeting {
    /// Listens at all of them; TCP port 0 takes a free one.
    pub fn open(at: &[Rendezvous]) -> Result<Self> {
        let (mut listeners, mut addresses) = (Vec::new(), Vec::new());
        for place in at {
            let open = |source| BootstrapError::Open {
                rank: 0,
                address: place.to_string(),
                source,
            };
            let listener = Listener::open(place).map_err(open)?;
            addresses.push(listener.address(place).map_err(open)?);
            listeners.push(listener);
        }
        Ok(Self {
            listeners,
            addresses,
        })
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[Rendezvous] {
        &self.addresses
    }

    /// The next connection, if somebody is knocking.
    pub(super) fn accept(&self) -> Result<Option<Stream>> {
        for (listener, address) in self.listeners.iter().zip(&self.addresses) {
            let accepted = listener.accept().map_err(|source| BootstrapError::Door {
                address: address.to_string(),
                source: doorbell_hca::limits::told(source),
            })?;
            if accepted.is_some() {
                return Ok(accepted);
            }
        }
        Ok(None)
    }
}

impl Bootstrap {
    /// As rank 0, at a place that is open already. Who does not know the secret gets no seat.
    pub fn preside(
        meeting: &Meeting,
        secret: &[u8],
        world: u32,
        timeout: Duration,
    ) -> Result<Self> {
        if world == 0 {
            return Err(BootstrapError::Rank { rank: 0, world });
        }
        let peers = gather_ranks(meeting, &hello(secret, world), world, timeout)?;
        Ok(Self::new(0, world, timeout, Role::Hub(peers)))
    }

    /// As another rank, at the first of these places where rank 0 answers. It opened them before it told of them, so who finds all of them closed is
    /// too late, and does not try for as long as there is.
    pub fn attend(
        at: &[Rendezvous],
        secret: &[u8],
        rank: u32,
        world: u32,
        timeout: Duration,
    ) -> Result<Self> {
        if rank == 0 || rank >= world {
            return Err(BootstrapError::Rank { rank, world });
        }
        Self::enter(at, secret, rank, world, timeout, true)
    }

    /// The same where rank 0 has yet to begin, unless the places were `open`.
    pub(super) fn enter(
        at: &[Rendezvous],
        secret: &[u8],
        rank: u32,
        world: u32,
        timeout: Duration,
        open: bool,
    ) -> Result<Self> {
        let hub = enlist(at, hello(secret, world), rank, world, timeout, open)?;
        Ok(Self::new(rank, world, timeout, Role::Leaf(hub)))
    }

    fn new(rank: u32, world: u32, timeout: Duration, role: Role) -> Self {
        Self {
            rank,
            world,
            timeout,
            sequence: 0,
            role,
            gone: BTreeMap::new(),
            trouble: None,
            pulse: None,
        }
    }
}

/// What a rank says first: how many it expects, and what only the ranks of this job know.
fn hello(secret: &[u8], world: u32) -> Vec<u8> {
    let secret = &secret[..secret.len().min(MAX_SECRET)];
    [&world.to_le_bytes()[..], secret].concat()
}

/// Somebody who has not said yet who it is.
struct Guest {
    conn: Conn,
    until: Instant,
}

impl Guest {
    fn new(stream: Stream) -> Self {
        Self {
            conn: Conn::limited(stream, MAX_HELLO),
            until: Instant::now() + GRACE,
        }
    }

    /// What it said, or why it is not waited for any longer; `None`: it may still greet.
    fn greeting(&mut self, now: Instant) -> Option<std::result::Result<Frame, String>> {
        match self.conn.look(u32::MAX, 1) {
            Err(BootstrapError::Protocol {
                found, expected, ..
            }) => return Some(Err(format!("{found} instead of {expected}"))),
            Err(e) => return Some(Err(e.to_string())),
            Ok(()) => {}
        }
        if let Some(frame) = self.conn.take(|_| true) {
            return Some(Ok(frame));
        }
        match self.conn.ended() {
            Some(how) => Some(Err(how.to_owned())),
            None if now >= self.until => Some(Err(format!("no greeting within {GRACE:.0?}"))),
            None => None,
        }
    }

    fn refuse(mut self, reason: String) {
        tracing::warn!(%reason, "bootstrap: refused a connection");
        let e = BootstrapError::Refused { reason };
        fail_all(std::iter::once(&mut self.conn), 0, 0, &e);
    }
}

/// Guests are looked at together: silent ones keep nobody out, and cost descriptors for a moment each.
fn gather_ranks(
    meeting: &Meeting,
    hello: &[u8],
    world: u32,
    timeout: Duration,
) -> Result<Vec<Conn>> {
    let deadline = doorbell_hca::deadline(timeout);
    let mut seats: Vec<Option<Conn>> = (1..world).map(|_| None).collect();
    let mut guests: Vec<Guest> = Vec::new();
    while seats.iter().any(Option::is_none) {
        while guests.len() < GUESTS
            && let Some(stream) = let_in(meeting, &mut seats, &mut guests)?
        {
            guests.push(Guest::new(stream));
        }
        let now = Instant::now();
        let mut at = 0;
        while let Some(guest) = guests.get_mut(at) {
            let Some(said) = guest.greeting(now) else {
                at += 1;
                continue;
            };
            let mut guest = guests.remove(at);
            let refusal = match said {
                Ok(frame) if frame.kind == Kind::Hello && frame.body == hello => {
                    let seat = (frame.rank as usize).checked_sub(1);
                    match seat.and_then(|i| seats.get_mut(i)) {
                        Some(seat @ None) => {
                            guest.conn.let_in();
                            *seat = Some(guest.conn);
                            continue;
                        }
                        Some(Some(_)) => format!("rank {} is there already", frame.rank),
                        None => format!("rank {} is outside a world of {world}", frame.rank),
                    }
                }
                Ok(frame) if frame.body.first_chunk::<4>() == Some(&world.to_le_bytes()) => {
                    format!("{:?} of another job", frame.kind)
                }
                Ok(frame) => {
                    format!("{:?} for another world than {world} rank(s)", frame.kind)
                }
                Err(why) => why,
            };
            guest.refuse(refusal);
        }
        if seats.iter().all(Option::is_some) {
            break;
        }
        if guests.len() == GUESTS
            && let Some(stream) = let_in(meeting, &mut seats, &mut guests)?
        {
            // Ranks greet as they come in, so the one that has been silent for longest is none.
            let oldest = guests.remove(0);
            oldest.refuse("no greeting, and others are at the door".to_owned());
            guests.push(Guest::new(stream));
        }
        if now >= deadline {
            let empty = seats.iter().zip(1u32..).filter(|(s, _)| s.is_none());
            let e = BootstrapError::Missing {
                what: "join",
                missing: empty.map(|(_, r)| r).collect(),
                world,
                after: timeout,
            };
            fail_all(seats.iter_mut().flatten(), 0, 0, &e);
            return Err(e);
        }
        wait(guests.iter().map(|guest| &guest.conn), RETRY);
    }
    let mut streams: Vec<Conn> = seats.into_iter().flatten().collect();
    for stream in &mut streams {
        // A new socket has room for it.
        stream.send(&Frame::of(Kind::Welcome, 0, 0, Vec::new()));
    }
    Ok(streams)
}

/// Who is at the door, if anybody. That nobody can be let in any more is told to all who are here.
fn let_in(
    meeting: &Meeting,
    seats: &mut [Option<Conn>],
    guests: &mut [Guest],
) -> Result<Option<Stream>> {
    meeting.accept().inspect_err(|e| {
        let guests = guests.iter_mut().map(|guest| &mut guest.conn);
        fail_all(seats.iter_mut().flatten().chain(guests), 0, 0, e);
    })
}

fn enlist(
    at: &[Rendezvous],
    hello: Vec<u8>,
    rank: u32,
    world: u32,
    timeout: Duration,
    open: bool,
) -> Result<Conn> {
    let deadline = doorbell_hca::deadline(timeout);
    let mut last = None;
    let mut closed = 0;
    let mut stream = 'found: loop {
        let mut refused = 0;
        for place in at {
            let left = deadline.saturating_duration_since(Instant::now());
            match connect_once(place, left) {
                Ok(stream) => break 'found stream,
                // No time will mend that.
                Err(source) if Unknown::is(&source) && at.len() == 1 => {
                    return Err(BootstrapError::Open {
                        rank,
                        address: place.to_string(),
                        source,
                    });
                }
                // Rank 0 may not have started yet, so every failure is worth another attempt. A full queue, which these may fill, says less than what was said before.
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && last.is_some() => {}
                Err(e) => {
                    refused += usize::from(e.kind() == std::io::ErrorKind::ConnectionRefused);
                    last = Some((place, e));
                }
            }
        }
        closed = if refused == at.len() { closed + 1 } else { 0 };
        if open && closed == CLOSED {
            let places: Vec<String> = at.iter().map(Rendezvous::to_string).collect();
            return Err(BootstrapError::Lost {
                what: "join",
                rank: 0,
                reason: format!(
                    "nobody listens at {} any more: it has ended or given up, or something on the way refuses connections",
                    places.join(" or ")
                ),
            });
        }
        if Instant::now() >= deadline {
            return Err(match last {
                Some((place, source)) => BootstrapError::Unreachable {
                    place: place.to_string(),
                    world,
                    after: timeout,
                    source,
                },
                None => BootstrapError::Missing {
                    what: "join",
                    missing: vec![0],
                    world,
                    after: timeout,
                },
            });
        }
        std::thread::sleep(RETRY);
    };
    let hello = Frame::of(Kind::Hello, rank, 0, hello);
    stream
        .send(&hello, deadline)
        .map_err(|e| BootstrapError::Lost {
            what: "join",
            rank: 0,
            reason: e.to_string(),
        })?;
    let frame = stream
        .receive(0, "join", deadline + GRACE)
        .map_err(|e| with_context(e, world, timeout))?;
    expect(&frame, 0, Kind::Welcome, 0, 0)?;
    Ok(Conn::new(stream))
}
