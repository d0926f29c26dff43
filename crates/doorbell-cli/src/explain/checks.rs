//! What the engine checks before it moves a byte, in its order, with the values of this run.
//!
//! This is worked out from the queue's bytes and the table of regions alone, without the engine: its answer, the CQE, is then
//! compared with it. A page that disagrees with the engine says so and fails.

use doorbell::{Access, Syndrome, Vendor};
use doorbell_wire::db::{self, Advance};
use doorbell_wire::{Ctrl, Key, Local, Payload, Piece, Request, WqeError};

use super::fields::chunks;

/// One check: what was looked at, and how it came out; `None` is something done, not asked.
#[derive(Debug)]
pub(super) struct Check {
    pub(super) ok: Option<bool>,
    pub(super) text: String,
}

/// Why the engine will refuse the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) syndrome: Syndrome,
    pub(super) vendor: Vendor,
}

/// A memory region as the key table has it.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) name: &'static str,
    pub(super) key: u32,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) pd: u32,
}

/// The queue as the engine knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    pub(super) qpn: u32,
    pub(super) depth: u32,
    pub(super) pd: u32,
    /// The target's protection domain.
    pub(super) far_pd: u32,
    /// Slots announced so far.
    pub(super) seen: u64,
    /// Memory of the receive that the target has posted.
    pub(super) receive: Option<Local>,
}

/// A message that is longer than the receive.
const TOO_SHORT: (Syndrome, Vendor) = (Syndrome::REMOTE_INVAL_REQ, Vendor::BAD_LENGTH);
/// Memory of a receive that may not be written.
const REFUSED: (Syndrome, Vendor) = (Syndrome::REMOTE_OP, Vendor::LKEY_ACCESS);

/// The list that is being made.
struct List(Vec<Check>);

impl List {
    /// Notes a check; fails with `refusal` unless it came out well.
    fn check(
        &mut self,
        ok: bool,
        text: String,
        syndrome: Syndrome,
        vendor: Vendor,
    ) -> Result<(), Refusal> {
        self.0.push(Check { ok: Some(ok), text });
        if ok {
            Ok(())
        } else {
            Err(Refusal { syndrome, vendor })
        }
    }

    fn does(&mut self, text: String) {
        self.0.push(Check { ok: None, text });
    }
}

/// What the doorbell word means to the engine: the new slots.
pub(super) fn doorbell(word: [u8; 8], queue: &Queue) -> (Vec<Check>, u64) {
    let (pi, qpn) = db::parse(u64::from_ne_bytes(word));
    let own = qpn.get() == queue.qpn;
    let new = match db::advance16(pi as u16, queue.seen as u16, queue.depth) {
        Advance::Slots(n) => u64::from(n),
        Advance::None | Advance::Jump => 0,
    };
    let checks = vec![
        Check {
            ok: Some(own),
            text: format!("doorbell names QP {:#08x}: this queue", qpn.get()),
        },
        Check {
            ok: Some(new > 0),
            text: format!(
                "index {pi} is {new} ahead of {}: 1 to {} slots are news",
                queue.seen, queue.depth
            ),
        },
    ];
    (checks, new)
}

/// The checks of the WQE in slot `at` with `rung` slots announced, and why it is refused if it is.
pub(super) fn wqe(
    bytes: &[u8; 64],
    at: u64,
    rung: u64,
    queue: &Queue,
    regions: &[Region],
) -> (Vec<Check>, Option<Refusal>) {
    let mut list = List(Vec::new());
    let refusal = walk(&mut list, bytes, at, rung, queue, regions).err();
    if let Some(refusal) = refusal {
        list.does(format!(
            "refused, and nothing has moved: syndrome {:#04x}, vendor syndrome {:#04x}",
            refusal.syndrome.0, refusal.vendor.0
        ));
    }
    (list.0, refusal)
}

fn walk(
    list: &mut List,
    bytes: &[u8; 64],
    at: u64,
    rung: u64,
    queue: &Queue,
    regions: &[Region],
) -> Result<(), Refusal> {
    let chunks = chunks(bytes);
    let ctrl = Ctrl::parse(chunks[0]);
    let local_op = Syndrome::LOCAL_QP_OP;
    let text = format!("control segment carries index {}: slot {at}", ctrl.idx);
    list.check(ctrl.idx == at as u16, text, local_op, Vendor::STALE_INDEX)?;
    let text = format!("and QP {:#08x}: this queue", ctrl.qpn);
    list.check(ctrl.qpn == queue.qpn, text, local_op, Vendor::BAD_QPN)?;
    let slots = u64::from(ctrl.slots());
    let text = format!("ds {}: {slots} slot, {} rung", ctrl.ds, rung - at);
    let fits = (1..=rung - at).contains(&slots) && usize::from(ctrl.ds) <= chunks.len();
    list.check(fits, text, local_op, Vendor::BAD_DS)?;
    let request = match Request::parse(&chunks[..usize::from(ctrl.ds)]) {
        Ok(request) => {
            list.check(
                true,
                format!(
                    "opcode {:#04x} {}, sizes as it needs them",
                    ctrl.opcode,
                    request.opcode()
                ),
                local_op,
                Vendor::NONE,
            )?;
            request
        }
        Err(error) => {
            let (syndrome, vendor) = parse_refusal(&error);
            return list.check(false, error.to_string(), syndrome, vendor);
        }
    };
    let near = Side::near(queue, regions);
    let far = Side::far(queue, regions);
    match request {
        Request::Write { remote, local, .. } => {
            far.check(
                list,
                remote.key,
                remote.addr,
                local.len(),
                Access::REMOTE_WRITE,
            )?;
            pieces(list, &near, local, Access::NONE)?;
            list.does(format!(
                "{} bytes are copied into the target's region",
                local.len()
            ));
        }
        Request::Read { remote, local } => {
            far.check(
                list,
                remote.key,
                remote.addr,
                local.len(),
                Access::REMOTE_READ,
            )?;
            pieces(list, &near, local, Access::LOCAL_WRITE)?;
            list.does(format!(
                "{} bytes are copied out of the target's region",
                local.len()
            ));
        }
        Request::FetchAdd { remote, local, add } => {
            let text = format!("{:#x} is a multiple of 8", remote.addr);
            list.check(true, text, local_op, Vendor::NONE)?;
            far.check(list, remote.key, remote.addr, 8, Access::REMOTE_ATOMIC)?;
            near.check(list, local.key, local.addr, 8, Access::LOCAL_WRITE)?;
            list.does(format!(
                "{add} is added to the word atomically, then its old value is stored"
            ));
        }
        Request::Send { local, .. } => {
            let len = local.len();
            pieces(list, &near, local, Access::NONE)?;
            let Some(receive) = queue.receive else {
                let text = "the target has no receive posted".to_owned();
                return list.check(false, text, Syndrome::RNR_RETRY, Vendor::NO_RECEIVE);
            };
            let text = format!("the target's receive has room: {} bytes", receive.len);
            let fits = u64::from(receive.len) >= len;
            list.check(fits, text, TOO_SHORT.0, TOO_SHORT.1)?;
            let target = Side::receive(queue, regions);
            target.check(list, receive.key, receive.addr, len, Access::LOCAL_WRITE)?;
            list.does(format!(
                "{len} bytes are copied to where the receive says, and the target gets a CQE"
            ));
        }
        other => list.does(format!("{other}")),
    }
    list.does(match ctrl.signalled() {
        true => "complete: its CQE is written after its bytes are in place".to_owned(),
        false => "complete; unsignalled, so a later CQE stands for it".to_owned(),
    });
    Ok(())
}

/// Every piece of registered memory; bytes inside the WQE need no key.
fn pieces(
    list: &mut List,
    near: &Side<'_>,
    payload: Payload<'_>,
    need: Access,
) -> Result<(), Refusal> {
    for piece in payload.pieces() {
        match piece {
            Piece::Local(local) => {
                near.check(list, local.key, local.addr, u64::from(local.len), need)?;
            }
            Piece::Inline(inline) => {
                list.does(format!(
                    "{} bytes lie in the WQE: no local key",
                    inline.len()
                ));
            }
        }
    }
    Ok(())
}

/// One end's view of the key table, with the codes that its failures have.
struct Side<'a> {
    regions: &'a [Region],
    pd: u32,
    word: &'static str,
    /// Unknown key, other domain, right missing, outside.
    codes: [(Syndrome, Vendor); 4],
}

impl<'a> Side<'a> {
    fn near(queue: &Queue, regions: &'a [Region]) -> Self {
        let codes = [
            Vendor::BAD_LKEY,
            Vendor::PD_MISMATCH,
            Vendor::LKEY_ACCESS,
            Vendor::LKEY_RANGE,
        ];
        Self {
            regions,
            pd: queue.pd,
            word: "lkey",
            codes: codes.map(|vendor| (Syndrome::LOCAL_PROT, vendor)),
        }
    }

    fn far(queue: &Queue, regions: &'a [Region]) -> Self {
        let codes = [
            Vendor::BAD_RKEY,
            Vendor::PD_MISMATCH,
            Vendor::RKEY_ACCESS,
            Vendor::RKEY_RANGE,
        ];
        Self {
            regions,
            pd: queue.far_pd,
            word: "rkey",
            codes: codes.map(|vendor| (Syndrome::REMOTE_ACCESS, vendor)),
        }
    }

    /// The target's own memory, named by its receive.
    fn receive(queue: &Queue, regions: &'a [Region]) -> Self {
        Self {
            regions,
            pd: queue.far_pd,
            word: "the receive's lkey",
            codes: [REFUSED; 4],
        }
    }

    fn check(
        &self,
        list: &mut List,
        key: Key,
        addr: u64,
        len: u64,
        need: Access,
    ) -> Result<(), Refusal> {
        let [unknown, domain, right, range] = self.codes;
        let found = self.regions.iter().find(|r| r.key == key.0);
        let name = found.map_or("no region has this key".to_owned(), |r| {
            format!("region \"{}\"", r.name)
        });
        let text = format!("{} {:#010x}: {name}", self.word, key.0);
        list.check(found.is_some(), text, unknown.0, unknown.1)?;
        let Some(region) = found else {
            return Ok(());
        };
        let text = format!(
            "its protection domain is {}, this end's is {}",
            region.pd, self.pd
        );
        list.check(region.pd == self.pd, text, domain.0, domain.1)?;
        let text = if need == Access::NONE {
            "reading it here needs no right".to_owned()
        } else {
            format!(
                "it grants {}; needed is {}",
                rights(region.access),
                rights(need)
            )
        };
        list.check(region.access.contains(need), text, right.0, right.1)?;
        let inside = addr
            .checked_sub(region.base)
            .and_then(|offset| offset.checked_add(len))
            .is_some_and(|end| end <= region.len);
        let text = format!(
            "{len} bytes from {addr:#x} lie {} {:#x}+{:#x}",
            if inside { "inside" } else { "not inside" },
            region.base,
            region.len
        );
        list.check(inside, text, range.0, range.1)
    }
}

/// Rights as words.
pub(super) fn rights(access: Access) -> String {
    let all = [
        (Access::LOCAL_WRITE, "LOCAL_WRITE"),
        (Access::REMOTE_WRITE, "REMOTE_WRITE"),
        (Access::REMOTE_READ, "REMOTE_READ"),
        (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
    ];
    let names: Vec<&str> = all
        .iter()
        .filter(|(bit, _)| access.contains(*bit))
        .map(|(_, name)| *name)
        .collect();
    match names.is_empty() {
        true => "nothing".to_owned(),
        false => names.join(", "),
    }
}

fn parse_refusal(error: &WqeError) -> (Syndrome, Vendor) {
    match error {
        WqeError::Truncated { .. } | WqeError::Ds { .. } => (Syndrome::LOCAL_QP_OP, Vendor::BAD_DS),
        WqeError::Opcode { .. } => (Syndrome::LOCAL_QP_OP, Vendor::BAD_OPCODE),
        WqeError::Opmod { .. } => (Syndrome::LOCAL_QP_OP, Vendor::BAD_OPMOD),
        WqeError::Length { .. } => (Syndrome::LOCAL_LENGTH, Vendor::BAD_LENGTH),
        WqeError::Inline { .. } | WqeError::InlineNotAllowed { .. } => {
            (Syndrome::LOCAL_QP_OP, Vendor::BAD_INLINE)
        }
        WqeError::Misaligned { .. } => (Syndrome::REMOTE_INVAL_REQ, Vendor::MISALIGNED),
        WqeError::Cqn { .. } => (Syndrome::LOCAL_QP_OP, Vendor::BAD_WAIT_CQ),
    }
}
