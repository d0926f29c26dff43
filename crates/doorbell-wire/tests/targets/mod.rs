//! What the fuzzers run: parsers on any bytes, with everything asserted that must hold whatever comes in.
//!
//! Shared by the fuzz crate at the repository's root and by `any_bytes.rs`, which runs the same functions on stable Rust in every test run.

use doorbell_wire::cqe::{self, Cqe, CqeTail, ErrorCqe, Kind};
use doorbell_wire::{
    Chunk, Ctrl, Dump, Local, Payload, Piece, Request, Syndrome, Vendor, Width, Wqe, db, seg,
};

fn chunks(data: &[u8]) -> Vec<Chunk> {
    data.chunks_exact(16)
        .map(|b| Chunk::from_bytes(b.try_into().expect("16 bytes")))
        .collect()
}

/// Any bytes as a WQE: parsed or refused, printed, and if it can be built, rebuilt to the same request.
pub(crate) fn wqe(data: &[u8]) {
    let slots = chunks(data);
    let text = Dump(&slots).to_string();
    assert_eq!(text.lines().count(), 1 + slots.len());
    let request = match Request::parse(&slots) {
        Ok(request) => request,
        Err(error) => {
            assert!(error.syndrome() != Syndrome::NONE && error.vendor().0 >= 0x81);
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let ctrl = Ctrl::parse(slots[0]);
    assert_eq!(ctrl.opcode(), Ok(request.opcode()));
    let ds = usize::from(ctrl.ds);
    assert!(ds >= 1 && ds <= slots.len() && ds <= 63);
    assert_eq!(usize::from(ctrl.slots()), ds.div_ceil(4));
    // Chunks behind the WQE must not matter.
    assert_eq!(Request::parse(&slots[..ds]), Ok(request));
    // Reserved bytes must not matter.
    let mut clean = slots[..ds].to_vec();
    clean[0] = ctrl.emit();
    assert_eq!(Ctrl::parse(clean[0]), ctrl);
    assert_eq!(Request::parse(&clean), Ok(request));

    if let Request::Write { local, .. }
    | Request::Send { local, .. }
    | Request::Read { local, .. } = request
    {
        payload(local, ds);
    }
    if let Some(built) = rebuild(&request) {
        let again = built.emit(ctrl.idx, doorbell_wire::Qpn::truncate(ctrl.qpn));
        let ds = usize::from(built.ds());
        assert!(again[ds..].iter().all(|c| *c == Chunk::ZERO));
        let back = Request::parse(&again[..ds]).expect("what was built parses");
        assert_eq!(back.to_string(), request.to_string());
        assert_eq!(inline_bytes(&back), inline_bytes(&request));
    }
}

fn payload(local: Payload<'_>, ds: usize) {
    let mut total = 0;
    let mut taken = 0;
    for piece in local.pieces() {
        total += piece.len();
        taken += match piece {
            Piece::Local(_) => 1,
            Piece::Inline(inline) => {
                assert_eq!(inline.bytes().count(), inline.len());
                assert!(inline.len() <= 16 * ds - 4);
                let mut copy = vec![0; inline.len()];
                assert_eq!(inline.copy_to(&mut copy), Some(inline.len()));
                assert!(inline.bytes().eq(copy.iter().copied()));
                if let Some(short) = copy.len().checked_sub(1) {
                    assert_eq!(inline.copy_to(&mut copy[..short]), None);
                }
                seg::inline_ds(inline.len() as u32) as usize
            }
        };
    }
    assert_eq!(local.len(), total);
    assert_eq!(local.is_empty(), total == 0);
    assert!(taken < ds);
}

fn inline_bytes(request: &Request<'_>) -> Option<Vec<u8>> {
    match request {
        Request::Write {
            local: Payload::Inline(i),
            ..
        }
        | Request::Send {
            local: Payload::Inline(i),
            ..
        } => Some(i.bytes().collect()),
        _ => None,
    }
}

/// The request through `Wqe`, where `Wqe` can say it.
fn rebuild(request: &Request<'_>) -> Option<Wqe> {
    const NOTHING: Local = Local {
        addr: 0,
        key: doorbell_wire::Key(0),
        len: 0,
    };
    let one = |payload: Payload<'_>| match payload {
        Payload::Local(local) => Some(local),
        Payload::Empty => Some(NOTHING),
        _ => None,
    };
    let inline = inline_bytes(request);
    Some(match (*request, inline) {
        (
            Request::Write {
                remote, imm: None, ..
            },
            Some(bytes),
        ) => Wqe::write_inline(remote, &bytes).ok()?,
        (Request::Send { imm: None, .. }, Some(bytes)) => Wqe::send_inline(&bytes).ok()?,
        (_, Some(_)) => return None,
        (Request::Nop, _) => Wqe::nop(),
        (
            Request::Write {
                remote,
                local,
                imm: None,
            },
            _,
        ) => must(Wqe::write(remote, one(local)?)),
        (
            Request::Write {
                remote,
                local,
                imm: Some(imm),
            },
            _,
        ) => must(Wqe::write_imm(remote, one(local)?, imm)),
        (Request::Send { local, imm: None }, _) => must(Wqe::send(one(local)?)),
        (
            Request::Send {
                local,
                imm: Some(imm),
            },
            _,
        ) => must(Wqe::send_imm(one(local)?, imm)),
        (Request::Read { remote, local }, _) => must(Wqe::read(remote, one(local)?)),
        (Request::FetchAdd { remote, local, add }, _) => must(Wqe::fetch_add(remote, local, add)),
        (
            Request::CompareSwap {
                remote,
                local,
                swap,
                compare,
            },
            _,
        ) => must(Wqe::compare_swap(remote, local, compare, swap)),
        (
            Request::MaskedFetchAdd {
                remote,
                local,
                width: Width::Eight,
                add,
                boundary,
            },
            _,
        ) => must(Wqe::masked_fetch_add8(remote, local, add, boundary)),
        (
            Request::MaskedFetchAdd {
                remote,
                local,
                width: Width::Four,
                add,
                boundary,
            },
            _,
        ) => must(Wqe::masked_fetch_add4(
            remote,
            local,
            low(add),
            low(boundary),
        )),
        (
            Request::MaskedCompareSwap {
                remote,
                local,
                width,
                swap,
                compare,
                swap_mask,
                compare_mask,
            },
            _,
        ) => {
            let (c, s) = ((compare, compare_mask), (swap, swap_mask));
            match width {
                Width::Eight => must(Wqe::masked_compare_swap8(remote, local, c, s)),
                Width::Four => {
                    let (c, s) = ((low(c.0), low(c.1)), (low(s.0), low(s.1)));
                    must(Wqe::masked_compare_swap4(remote, local, c, s))
                }
            }
        }
        (Request::Wait { index, cqn }, _) => Wqe::wait(index, cqn),
        (Request::Dump { local }, _) => must(Wqe::dump(local)),
    })
}

fn must(wqe: Result<Wqe, doorbell_wire::WqeError>) -> Wqe {
    wqe.expect("what parsed can be built")
}

fn low(operand: u64) -> u32 {
    operand
        .try_into()
        .expect("4-byte operands are zero-extended")
}

/// Any 64 bytes as a CQE, any 8 as a doorbell word.
pub(crate) fn cqe(data: &[u8]) {
    let Some(entry) = data.first_chunk::<64>() else {
        return;
    };
    let entry: [Chunk; 4] = chunks(entry).try_into().expect("4 chunks");
    let (any, error) = (Cqe::parse(&entry), ErrorCqe::parse(&entry));
    let tail = CqeTail::of(entry[3]);
    assert_eq!(any.tail, tail);
    assert_eq!(error.is_some(), tail.is_error());
    let Some(kind) = tail.kind() else { return };
    let clean = CqeTail::new(tail.wqe_counter(), kind, tail.owner());
    assert_eq!(
        (clean.wqe_counter(), clean.kind(), clean.owner()),
        (tail.wqe_counter(), Some(kind), tail.owner())
    );
    match (kind, error) {
        (Kind::Requester, None) => {
            let again = cqe::ok_chunks(
                any.qpn,
                any.opcode,
                tail.wqe_counter(),
                tail.owner(),
                any.byte_cnt,
            );
            assert_eq!(
                Cqe::parse(&again),
                Cqe {
                    tail: clean,
                    imm: 0,
                    ..any
                }
            );
        }
        (_, Some(e)) => {
            let again = cqe::error_chunks(
                kind,
                e.qpn,
                e.opcode,
                tail.wqe_counter(),
                tail.owner(),
                e.syndrome,
                e.vendor,
            );
            assert_eq!(ErrorCqe::parse(&again), Some(ErrorCqe { tail: clean, ..e }));
            assert!(!e.syndrome.to_string().is_empty() && !e.vendor.to_string().is_empty());
            assert!(e.vendor.name().is_some() == Vendor::ALL.contains(&e.vendor));
        }
        (_, None) => {
            let again = cqe::recv_chunks(
                kind,
                any.qpn,
                tail.wqe_counter(),
                tail.owner(),
                any.byte_cnt,
                any.imm,
            );
            assert_eq!(
                Cqe::parse(&again),
                Cqe {
                    tail: clean,
                    opcode: 0,
                    ..any
                }
            );
        }
    }
    let word = entry[0].0[0];
    let (pi, qpn) = db::parse(word);
    assert!(pi < 1 << 24);
    // All but the opcode and ds bytes, which a doorbell does not use, comes back.
    assert_eq!(
        db::doorbell_word(pi.into(), qpn),
        word & 0x00ff_ffff_00ff_ffff
    );
    assert_eq!(
        db::record(db::parse_record(word as u32).into()),
        word as u32 & 0xffff_0000
    );
}

/// Any bytes as a RoCEv2 packet: refused with words, or emitted again with the same meaning.
pub(crate) fn roce(data: &[u8]) {
    use doorbell_wire::roce::icrc::{self, Ip};
    use doorbell_wire::roce::net::{Arp, Ethernet, Ipv4, Ipv6, Neighbour, Udp};
    use doorbell_wire::roce::{MAX_HEADER, Packet};

    if let Some((ethernet, rest)) = Ethernet::parse(data) {
        assert_eq!(
            Ethernet::parse(&ethernet.emit()).map(|(e, _)| e),
            Some(ethernet)
        );
        if let Some(arp) = Arp::parse(rest) {
            assert_eq!(Arp::parse(&arp.emit()), Some(arp));
        }
        if let Some((ip, payload)) = Ipv4::parse(rest) {
            let header = ip.emit(payload.len() as u16);
            assert!(Ipv4::parse(&[&header[..], payload].concat()).is_some());
        }
        if let Some((ip, payload)) = Ipv6::parse(rest) {
            let header = ip.emit(payload.len() as u16);
            assert_eq!(
                Ipv6::parse(&[&header[..], payload].concat()).map(|(i, _)| i),
                Some(ip)
            );
        }
        let _ = (Udp::parse(rest), Neighbour::parse(rest));
    }
    let crc = icrc::compute(&Ip::V4(Ipv4::default()), 1, 2, data);
    let packet = match Packet::parse(data) {
        Ok(packet) => packet,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert!(!packet.to_string().is_empty());
    let mut header = [0; MAX_HEADER];
    let len = packet.header().emit(&mut header);
    let pad = usize::from(packet.bth.pad);
    assert_eq!(len + packet.payload.len() + pad, data.len());
    let mut again = header[..len].to_vec();
    again.extend_from_slice(packet.payload);
    again.resize(data.len(), 0);
    assert_eq!(Packet::parse(&again), Ok(packet));
    // A wrong bit anywhere in the payload shows.
    if let Some(last) = packet.payload.len().checked_sub(1) {
        let mut damaged = data.to_vec();
        damaged[len + last] ^= 0x10;
        assert_ne!(icrc::compute(&Ip::V4(Ipv4::default()), 1, 2, &damaged), crc);
    }
}
