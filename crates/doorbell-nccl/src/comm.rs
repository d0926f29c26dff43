//! A communicator: the ranks that NCCL connects, how each reaches the others, and the steps that they take together.
//!
//! Rank 0 presides; whatever all ranks must know goes through it, with a time-out that names who did not come. A rank that cannot
//! do its part says so in the same exchange, so that the others fail with its reason and at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use doorbell::{
    Access, Addressing, Bootstrap, Destination, Endpoint, LinkKind, Listener, Meeting, Memory, Mr,
    Pd, Peer, QpCore, Rendezvous,
};

use doorbell_hca::shm::ShmError;

use crate::abi::HANDLE;
use crate::handle::{Handle, host};
use crate::health::Health;
use crate::node::{Node, Watched};
use crate::settings::{LinkChoice, Settings};
use crate::shadow::Shadow;
use crate::{Error, Result, log};

/// What `listen` makes.
pub(crate) struct Listening {
    pub(crate) handle: Handle,
    meeting: Meeting,
}

impl Listening {
    /// Listens for the ranks of one communicator.
    pub(crate) fn open() -> Result<Self> {
        let settings = Settings::read()?;
        let mut handle = Handle {
            secret: rand::random(),
            host: host(),
            address: (settings.address, 0).into(),
        };
        let places = [
            Rendezvous::Unix(handle.name().into()),
            Rendezvous::Tcp(handle.address.to_string()),
        ];
        let meeting = Meeting::open(&places).map_err(doorbell::Error::from)?;
        for place in meeting.addresses() {
            if let Rendezvous::Tcp(text) = place
                && let Ok(address) = text.parse()
            {
                handle.address = address;
            }
        }
        Ok(Self { handle, meeting })
    }
}

/// How a rank is reached.
#[derive(Debug)]
pub(crate) enum Link {
    /// It uses the same HCA, or is this rank.
    Loopback,
    /// It is a process, or another GPU, of this host.
    Shm(Peer),
    /// By packets.
    Roce,
}

impl Link {
    pub(crate) fn kind(&self) -> LinkKind {
        match self {
            Self::Loopback => LinkKind::Loopback,
            Self::Shm(_) => LinkKind::Shm,
            Self::Roce => LinkKind::Roce,
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Shm(_) => "shared memory",
            Self::Roce => "RoCE",
        }
    }
}

/// What `connect` makes.
pub(crate) struct Comm {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) settings: Settings,
    pub(crate) health: Arc<Health>,
    pub(crate) links: Vec<Link>,
    pub(crate) pd: Pd,
    shadows: Mutex<Vec<Arc<Shadow>>>,
    mesh: Arc<Mutex<Bootstrap>>,
    /// How long those that use memory are still waited for, all in all, once something has failed.
    quiesce: Mutex<Duration>,
    /// Takes this communicator off the node's lists.
    watched: Mutex<Option<Watched>>,
    pub(crate) node: Arc<Node>,
}

/// What a rank tells the others about itself when they connect.
struct Card {
    hca: u64,
    host: u64,
    /// A place in the abstract name space where it waits for sessions; the number makes the name.
    shm: u64,
    /// What it was told about links.
    choice: LinkChoice,
}

impl Card {
    fn to_bytes(&self) -> Vec<u8> {
        [self.hca, self.host, self.shm, self.choice as u64]
            .iter()
            .flat_map(|n| n.to_le_bytes())
            .collect()
    }

    fn from_bytes(bytes: &[u8], rank: usize) -> Result<Self> {
        let mut words = bytes.chunks_exact(8).map(|c| {
            let mut word = [0; 8];
            word.copy_from_slice(c);
            u64::from_le_bytes(word)
        });
        let mut next = || words.next();
        let all = (next(), next(), next(), next().and_then(LinkChoice::of));
        match (all, bytes.len()) {
            ((Some(hca), Some(host), Some(shm), Some(choice)), 32) => Ok(Self {
                hca,
                host,
                shm,
                choice,
            }),
            _ => Err(Error::Handle {
                rank,
                found: format!("its card has {} bytes", bytes.len()),
                expected: "32 bytes".to_owned(),
            }),
        }
    }

    /// Does this rank reach that one by packets?
    fn by_packets(&self, other: &Self) -> bool {
        match self.choice {
            LinkChoice::Roce => true,
            _ => self.hca != other.hca && self.host != other.host,
        }
    }

    /// Both ends of a link are of one kind.
    fn agrees(&self, other: &Self, rank: usize) -> Result<()> {
        match self.by_packets(other) == other.by_packets(self) {
            true => Ok(()),
            false => Err(Error::Link {
                rank,
                link: "one link in both directions",
                reason: format!(
                    "DOORBELL_NCCL_LINK is {} here and {} there: set it alike for all ranks",
                    self.choice, other.choice
                ),
            }),
        }
    }

    fn name(number: u64) -> String {
        format!("@doorbell-nccl-shm-{number:016x}")
    }
}

/// A rank's part in a step, as it travels: its name, then what it has to say or why it has nothing.
fn pack(step: &'static str, part: std::result::Result<&[u8], &Error>) -> Vec<u8> {
    let mut out = vec![step.len() as u8];
    out.extend_from_slice(step.as_bytes());
    match part {
        Ok(bytes) => {
            out.push(0);
            out.extend_from_slice(bytes);
        }
        Err(error) => {
            out.push(1);
            out.extend_from_slice(error.to_string().as_bytes());
        }
    }
    out
}

fn unpack(step: &'static str, rank: usize, bytes: &[u8]) -> Result<Vec<u8>> {
    let found = bytes.split_first().and_then(|(len, rest)| {
        let (name, rest) = rest.split_at_checked(usize::from(*len))?;
        let (failed, rest) = rest.split_first()?;
        Some((String::from_utf8_lossy(name).into_owned(), *failed, rest))
    });
    match found {
        Some((name, 0, rest)) if name == step => Ok(rest.to_vec()),
        Some((name, _, rest)) if name == step => Err(Error::Peer {
            step,
            rank,
            reason: String::from_utf8_lossy(rest).into_owned(),
        }),
        other => Err(Error::Order {
            rank,
            theirs: other.map_or("something else".to_owned(), |(name, ..)| name),
            ours: step,
        }),
    }
}

impl Comm {
    /// Connects this rank to the others. All of them call it with the same handles.
    pub(crate) fn connect(
        handles: &[[u8; HANDLE]],
        rank: usize,
        listening: &Listening,
    ) -> Result<Self> {
        let settings = Settings::read()?;
        let ranks = handles.len();
        let all = handles
            .iter()
            .enumerate()
            .map(|(r, bytes)| Handle::decode(bytes, r))
            .collect::<Result<Vec<_>>>()?;
        if all[rank] != listening.handle {
            return Err(Error::Argument {
                call: "connect",
                object: "the handle of this rank",
                value: "another one than listen() gave".to_owned(),
                remedy: "pass every rank's own handle at its place",
            });
        }
        let first = &all[0];
        let far = all.iter().position(|handle| handle.host != first.host);
        if let (Some(far), true) = (far, first.address.ip().is_loopback()) {
            return Err(Error::Link {
                rank: 0,
                link: "TCP",
                reason: format!(
                    "rank {far} is on another host, and rank 0 listens at {}: set DOORBELL_NCCL_ADDR for rank 0 to an address of its host",
                    first.address
                ),
            });
        }
        let secret = &first.secret;
        let (world, timeout) = (ranks as u32, settings.timeout);
        let mesh = match rank {
            0 => Bootstrap::preside(&listening.meeting, secret, world, timeout),
            _ => Bootstrap::attend(&first.places(host()), secret, rank as u32, world, timeout),
        };
        let mut mesh = mesh.map_err(|source| Error::Collective {
            step: "connect",
            rank,
            ranks,
            source,
        })?;
        mesh.keep_alive(settings.alive);
        let mesh = Arc::new(Mutex::new(mesh));
        let health = Arc::new(Health::new(format!("rank {rank} of {ranks}")));
        let steps = Steps {
            rank,
            ranks,
            mesh: &mesh,
            health: &health,
        };

        // From here on nobody leaves without telling the others why.
        let opened = Node::get(&settings).and_then(|node| {
            let pd = node.device.pd()?;
            let number = rand::random();
            // Ranks of this communicator wait for no other's.
            let listener = pd.listen(&Card::name(number))?;
            Ok((node, pd, number, listener))
        });
        // Nor is anybody lost between the steps without the others hearing of it. This rank has not said yet that it lives, so opening took its time.
        let mut watched = opened.as_ref().ok().map(|(node, ..)| {
            node.beats.add(&mesh);
            node.watch.enter(&health, &mesh)
        });
        let card = opened.as_ref().map(|(node, _, number, _)| {
            Card {
                hca: node.device.provider().id(),
                host: host(),
                shm: *number,
                choice: settings.link,
            }
            .to_bytes()
        });
        let cards = steps.gather("connect", card.as_ref().map(|v| &v[..]).map_err(|e| *e))?;
        let (node, pd, _, listener) = opened?;
        let cards = cards
            .iter()
            .enumerate()
            .map(|(r, bytes)| Card::from_bytes(bytes, r))
            .collect::<Result<Vec<_>>>();
        let links = cards.and_then(|cards| meet(&pd, &cards, rank, &settings, &listener, &health));
        if let (Err(error), false) = (&links, health.has_failed()) {
            // Others may wait for this rank to dial, or to answer.
            health.report(error);
        }
        steps.gather("connect: links", links.as_ref().map(|_| &[][..]))?;
        let links = links?;

        let peers: Vec<_> = links
            .iter()
            .enumerate()
            .filter_map(|(r, link)| match link {
                Link::Shm(peer) => Some((r, peer.clone())),
                _ => None,
            })
            .collect();
        if let Some(watched) = &mut watched {
            watched.add_peers(&health, &peers);
        }
        log::info(format_args!(
            "rank {rank} of {ranks}: {}",
            describe(&links, rank)
        ));
        Ok(Self {
            rank,
            ranks,
            settings,
            health,
            links,
            pd,
            shadows: Mutex::default(),
            mesh,
            quiesce: Mutex::new(node.device.settings().quiesce),
            watched: Mutex::new(watched),
            node,
        })
    }

    /// Signals of NCCL's proxy that are carried over to the GPU.
    pub(crate) fn shadows(&self) -> MutexGuard<'_, Vec<Arc<Shadow>>> {
        self.shadows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn steps(&self) -> Steps<'_> {
        Steps {
            rank: self.rank,
            ranks: self.ranks,
            mesh: &self.mesh,
            health: &self.health,
        }
    }

    /// Every rank gives something, or the reason why it cannot, and gets what all gave.
    pub(crate) fn gather(
        &self,
        step: &'static str,
        mine: std::result::Result<&[u8], &Error>,
    ) -> Result<Vec<Vec<u8>>> {
        self.steps().gather(step, mine)
    }

    /// Every rank gives something for each rank, or the reason why it cannot, and gets what each gave for it.
    pub(crate) fn swap(
        &self,
        step: &'static str,
        mine: std::result::Result<&[Vec<u8>], &Error>,
    ) -> Result<Vec<Vec<u8>>> {
        self.steps().swap(step, mine)
    }

    /// Registers memory, and waits until the other processes have mapped it: as long as a step may take, and while all are well.
    pub(crate) fn register(&self, memory: &Memory, access: Access) -> Result<Mr> {
        let time = self.settings.timeout;
        let deadline = Instant::now() + time;
        let gives_up = || match self.health.failure() {
            None if Instant::now() < deadline => None,
            None => Some(format!("{time:?} have passed (DOORBELL_NCCL_TIMEOUT)")),
            Some(reason) => Some(reason.to_owned()),
        };
        let mr = self
            .pd
            .register_while(memory, access, Addressing::Zero, &gives_up);
        Ok(mr?)
    }

    /// Ends something that others may be using, after a failure: who did not let go in time once is not waited for again.
    pub(crate) fn let_go<T>(&self, end: impl FnOnce(Duration) -> T) -> T {
        let mut left = self.quiesce.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = Instant::now();
        let ended = end((*left).max(MOMENT));
        *left = left.saturating_sub(begin.elapsed());
        ended
    }

    /// Rank `rank`'s queue pair as something to connect to.
    pub(crate) fn destination(&self, rank: usize, theirs: &Endpoint) -> Result<Destination> {
        Ok(match &self.links[rank] {
            Link::Loopback => Destination::Loopback { qpn: theirs.qpn },
            Link::Shm(peer) => peer.destination(theirs)?,
            Link::Roce => self.node.device.destination(theirs)?,
        })
    }

    /// This rank's queue pair as rank `rank` needs to know it.
    pub(crate) fn endpoint(&self, rank: usize, qp: &QpCore) -> Result<Endpoint> {
        Ok(qp.endpoint(self.links[rank].kind(), &[])?)
    }

    /// The others are told that this rank leaves, and that it means to. Contexts that are still there do not take part in anything any more.
    pub(crate) fn leave(&self) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody is to be told of what ends from here on. Sessions end with the links: in order, and in the background.
        if watched.take().is_some() {
            let mut mesh = self.mesh.lock().unwrap_or_else(PoisonError::into_inner);
            mesh.leave();
        }
    }

    /// As [`Comm::leave`], while contexts hold it still: the end of this process, which may come at any time, is then no death to the others.
    pub(crate) fn leave_early(&self) {
        self.leave();
        for link in &self.links {
            if let Link::Shm(peer) = link {
                // It is begun; the rest takes its time in the background.
                let _ = peer.close(Duration::from_millis(100));
            }
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The ranks' connection, as long as the communicator is not complete.
struct Steps<'a> {
    rank: usize,
    ranks: usize,
    mesh: &'a Mutex<Bootstrap>,
    health: &'a Health,
}

impl Steps<'_> {
    fn gather(
        &self,
        step: &'static str,
        mine: std::result::Result<&[u8], &Error>,
    ) -> Result<Vec<Vec<u8>>> {
        let mut mesh = self.mesh.lock().unwrap_or_else(PoisonError::into_inner);
        let all = mesh.all_gather_while(&pack(step, mine), &mut || self.failure());
        // What is logged of it is logged without the connection: the thread that beats needs it.
        drop(mesh);
        self.judge(step, mine.err(), all)
    }

    fn swap(
        &self,
        step: &'static str,
        mine: std::result::Result<&[Vec<u8>], &Error>,
    ) -> Result<Vec<Vec<u8>>> {
        let parts: Vec<Vec<u8>> = match mine {
            Ok(parts) => parts.iter().map(|part| pack(step, Ok(part))).collect(),
            Err(error) => vec![pack(step, Err(error)); self.ranks],
        };
        let mut mesh = self.mesh.lock().unwrap_or_else(PoisonError::into_inner);
        let all = mesh.all_to_all_while(&parts, &mut || self.failure());
        drop(mesh);
        self.judge(step, mine.err(), all)
    }

    /// What has gone wrong on this rank meanwhile, if the others are to be told: the watch does not while this rank has the connection.
    fn failure(&self) -> Option<String> {
        self.health.to_tell().map(str::to_owned)
    }

    /// The own failure is the caller's to return; the others' come before a success of this rank.
    fn judge(
        &self,
        step: &'static str,
        own: Option<&Error>,
        all: std::result::Result<Vec<Vec<u8>>, doorbell::BootstrapError>,
    ) -> Result<Vec<Vec<u8>>> {
        if let Err(error) = &all {
            self.health.hear(error);
        }
        let all = all.map_err(|source| Error::Collective {
            step,
            rank: self.rank,
            ranks: self.ranks,
            source,
        });
        if own.is_some() {
            return Ok(Vec::new());
        }
        all?.iter()
            .enumerate()
            .map(|(rank, bytes)| unpack(step, rank, bytes))
            .collect()
    }
}

/// In this time everybody lets go who goes on at all.
const MOMENT: Duration = Duration::from_millis(50);

/// How long this rank waits for another's session before it looks whether all are well.
const LOOK: Duration = Duration::from_millis(50);

/// Chooses the links, and meets the processes that are reached by shared memory: the lower rank dials. Ends when something goes wrong with any rank.
fn meet(
    pd: &Pd,
    cards: &[Card],
    rank: usize,
    settings: &Settings,
    listener: &Listener,
    health: &Health,
) -> Result<Vec<Link>> {
    let lost = || {
        health.failure().map(|reason| Error::Peer {
            step: "connect: links",
            rank,
            reason: reason.to_owned(),
        })
    };
    let deadline = Instant::now() + settings.timeout;
    let left = || deadline.saturating_duration_since(Instant::now());
    let own = &cards[rank];
    let mut others = cards.iter().enumerate().filter(|(r, _)| *r != rank);
    others.try_for_each(|(r, card)| own.agrees(card, r))?;
    let mut links = Vec::with_capacity(cards.len());
    let mut expected = 0;
    for (r, card) in cards.iter().enumerate() {
        let link = match settings.link {
            _ if r == rank => Link::Loopback,
            LinkChoice::Roce => Link::Roce,
            _ if card.hca == own.hca => Link::Loopback,
            _ if card.host == own.host => {
                if r > rank {
                    let name = Card::name(card.shm);
                    let mut goes_on = || !health.has_failed();
                    let peer = pd.dial_while(&name, left(), &mut goes_on);
                    let peer = peer.and_then(|peer| {
                        peer.send(&(rank as u64).to_le_bytes(), left())?;
                        Ok(peer)
                    });
                    Link::Shm(peer.map_err(|e| lost().unwrap_or_else(|| broken(r, &e)))?)
                } else {
                    // Until it has dialled.
                    expected += 1;
                    Link::Roce
                }
            }
            LinkChoice::Auto => Link::Roce,
            LinkChoice::Shm => {
                return Err(Error::Link {
                    rank: r,
                    link: "shared memory",
                    reason: "it is on another host, or in another network name space: set DOORBELL_NCCL_LINK=auto".to_owned(),
                });
            }
        };
        links.push(link);
    }
    let far = |r: &usize| cards[*r].host != own.host && matches!(links[*r], Link::Roce);
    if let Some(rank) = (0..links.len()).find(far) {
        let at = pd.device().roce_offer()?.address.ip();
        if at.is_loopback() {
            return Err(Error::Link {
                rank,
                link: "RoCE",
                reason: format!(
                    "it is on another host, which would be told to send to {at}: set DOORBELL_NCCL_ADDR (or DOORBELL_ROCE=udp://ADDRESS) to an address of this host"
                ),
            });
        }
    }
    for _ in 0..expected {
        let missing = |links: &[Link]| {
            let waits = |r: &usize| cards[*r].host == own.host && matches!(links[*r], Link::Roce);
            (0..rank).find(waits).unwrap_or(0)
        };
        let peer = loop {
            match listener.accept(left().min(LOOK)) {
                Ok(peer) => break peer,
                Err(e) => match lost() {
                    Some(lost) => return Err(lost),
                    None if !is_time_out(&e) => return Err(broken(missing(&links), &e)),
                    None if left().is_zero() => {
                        return Err(Error::Link {
                            rank: missing(&links),
                            link: "shared memory",
                            reason: format!(
                                "it has not dialled within {:?}{}",
                                settings.timeout,
                                listener
                                    .trouble()
                                    .map_or_else(String::new, |t| format!(": {t}"))
                            ),
                        });
                    }
                    None => {}
                },
            }
        };
        let hello = loop {
            match peer.recv(left().min(LOOK)) {
                Ok(hello) => break hello,
                Err(e) => match lost() {
                    Some(lost) => return Err(lost),
                    None if is_time_out(&e) && !left().is_zero() => {}
                    None => return Err(broken(missing(&links), &e)),
                },
            }
        };
        let r = <[u8; 8]>::try_from(hello.as_slice())
            .map_or(usize::MAX, |b| u64::from_le_bytes(b) as usize);
        match links.get_mut(r) {
            Some(link @ Link::Roce) if r < rank && cards[r].host == own.host => {
                *link = Link::Shm(peer)
            }
            _ => {
                return Err(Error::Link {
                    rank: r,
                    link: "shared memory",
                    reason: "a process that is no lower rank of this host dialled".to_owned(),
                });
            }
        }
    }
    Ok(links)
}

fn is_time_out(error: &doorbell::Error) -> bool {
    matches!(error, doorbell::Error::Shm(ShmError::Deadline { .. }))
}

fn broken(rank: usize, error: &doorbell::Error) -> Error {
    Error::Link {
        rank,
        link: "shared memory",
        reason: error.to_string(),
    }
}

/// `3 ranks by loopback, 4 by shared memory`.
fn describe(links: &[Link], rank: usize) -> String {
    let mut parts = Vec::new();
    for name in ["loopback", "shared memory", "RoCE"] {
        let count = links
            .iter()
            .enumerate()
            .filter(|(r, l)| *r != rank && l.name() == name)
            .count();
        if count > 0 {
            parts.push(format!("{count} by {name}"));
        }
    }
    match parts.is_empty() {
        true => "nobody else".to_owned(),
        false => format!("others are reached: {}", parts.join(", ")),
    }
}
