//! Properties: what `Wqe` builds, `Request` reads back as what was asked for; what `Wqe` refuses is what it should.

use doorbell_wire::cqe::{self, Cqe, CqeTail, ErrorCqe, Kind};
use doorbell_wire::{
    Chunk, Cqn, Ctrl, Fence, Key, Local, Opcode, Payload, Piece, Qpn, Remote, Request, Syndrome,
    Vendor, Width, Wqe, WqeError, arith, db, flags, seg,
};
use proptest::prelude::*;

fn remote() -> impl Strategy<Value = Remote> {
    (any::<u64>(), any::<u32>()).prop_map(|(addr, key)| Remote {
        addr,
        key: Key(key),
    })
}

fn local(len: impl Strategy<Value = u32>) -> impl Strategy<Value = Local> {
    (any::<u64>(), any::<u32>(), len).prop_map(|(addr, key, len)| Local {
        addr,
        key: Key(key),
        len,
    })
}

fn qpn() -> impl Strategy<Value = Qpn> {
    (0..1u32 << 24).prop_map(Qpn::truncate)
}

fn fence() -> impl Strategy<Value = Fence> {
    prop::sample::select(vec![
        Fence::None,
        Fence::Small,
        Fence::Reads,
        Fence::Strong,
        Fence::Full,
    ])
}

const MAX: u32 = 0x7fff_ffff;

/// Emits, checks the control segment, and hands the WQE's own chunks on.
fn emit(wqe: &Wqe, idx: u16, qpn: Qpn) -> Vec<Chunk> {
    let all = wqe.emit(idx, qpn);
    let ctrl = Ctrl::parse(all[0]);
    assert!(ctrl.matches(idx, qpn));
    assert!(
        !ctrl.matches(idx.wrapping_add(1), qpn)
            && !ctrl.matches(idx, Qpn::truncate(qpn.get() ^ 0x80_0000))
    );
    assert_eq!((ctrl.ds, ctrl.slots()), (wqe.ds(), wqe.slots()));
    assert_eq!(ctrl.opcode(), Ok(wqe.opcode()));
    all[..usize::from(wqe.ds())].to_vec()
}

proptest! {
    #[test]
    fn transfers(r in remote(), l in local(1..=MAX), imm: u32, idx: u16, q in qpn()) {
        let local = Payload::Local(l);
        let cases = [
            (Wqe::write(r, l), Request::Write { remote: r, local, imm: None }),
            (Wqe::write_imm(r, l, imm), Request::Write { remote: r, local, imm: Some(imm) }),
            (Wqe::send(l), Request::Send { local, imm: None }),
            (Wqe::send_imm(l, imm), Request::Send { local, imm: Some(imm) }),
            (Wqe::read(r, l), Request::Read { remote: r, local }),
            (Wqe::dump(l), Request::Dump { local: l }),
        ];
        for (wqe, want) in cases {
            let slots = emit(&wqe?, idx, q);
            prop_assert_eq!(Request::parse(&slots)?, want);
        }
        let none = Local { len: 0, ..l };
        let slots = emit(&Wqe::write(r, none)?, idx, q);
        prop_assert_eq!(Request::parse(&slots)?, Request::Write { remote: r, local: Payload::Empty, imm: None });
    }

    #[test]
    fn inline(r in remote(), bytes in prop::collection::vec(any::<u8>(), 0..=120), idx: u16, q in qpn()) {
        let (write, send) = (Wqe::write_inline(r, &bytes), Wqe::send_inline(&bytes));
        prop_assert_eq!(write.is_ok(), bytes.len() <= Wqe::INLINE_MAX);
        prop_assert_eq!(send.is_ok(), bytes.len() <= Wqe::SEND_INLINE_MAX);
        if let Ok(write) = write {
            prop_assert_eq!(write.slots() == 1, bytes.len() <= Wqe::INLINE_ONE_SLOT);
            let slots = emit(&write, idx, q);
            let Request::Write { remote, local: Payload::Inline(got), imm: None } = Request::parse(&slots)? else {
                return Err(TestCaseError::fail("not an inline write"));
            };
            prop_assert_eq!(remote, r);
            prop_assert_eq!(got.bytes().collect::<Vec<_>>(), &bytes[..]);
        }
        if let Ok(send) = send {
            let slots = emit(&send, idx, q);
            let Request::Send { local: Payload::Inline(got), imm: None } = Request::parse(&slots)? else {
                return Err(TestCaseError::fail("not an inline send"));
            };
            prop_assert_eq!(got.bytes().collect::<Vec<_>>(), &bytes[..]);
        }
    }

    #[test]
    fn atomics(r in remote(), l in local(Just(8)), v: [u64; 4], idx: u16, q in qpn()) {
        let r = Remote { addr: r.addr & !7, ..r };
        let l4 = Local { len: 4, ..l };
        let n = v.map(|x| x as u32);
        let [swap, compare, swap_mask, compare_mask] = v;
        let (e8, e4) = (Width::Eight, Width::Four);
        let cases = [
            (Wqe::fetch_add(r, l, swap), Request::FetchAdd { remote: r, local: l, add: swap }),
            (Wqe::compare_swap(r, l, compare, swap), Request::CompareSwap { remote: r, local: l, swap, compare }),
            (
                Wqe::masked_fetch_add8(r, l, v[0], v[1]),
                Request::MaskedFetchAdd { remote: r, local: l, width: e8, add: v[0], boundary: v[1] },
            ),
            (
                Wqe::masked_fetch_add4(r, l4, n[0], n[1]),
                Request::MaskedFetchAdd { remote: r, local: l4, width: e4, add: n[0].into(), boundary: n[1].into() },
            ),
            (
                Wqe::masked_compare_swap8(r, l, (compare, compare_mask), (swap, swap_mask)),
                Request::MaskedCompareSwap { remote: r, local: l, width: e8, swap, compare, swap_mask, compare_mask },
            ),
            (
                Wqe::masked_compare_swap4(r, l4, (n[1], n[3]), (n[0], n[2])),
                Request::MaskedCompareSwap {
                    remote: r,
                    local: l4,
                    width: e4,
                    swap: n[0].into(),
                    compare: n[1].into(),
                    swap_mask: n[2].into(),
                    compare_mask: n[3].into(),
                },
            ),
        ];
        for (wqe, want) in cases {
            let slots = emit(&wqe?, idx, q);
            prop_assert_eq!(Request::parse(&slots)?, want);
        }
    }

    #[test]
    fn wait(index: u32, cqn in 0..1u32 << 24, idx: u16, q in qpn()) {
        let cqn = Cqn::truncate(cqn);
        let slots = emit(&Wqe::wait(index, cqn), idx, q);
        prop_assert_eq!(Request::parse(&slots)?, Request::Wait { index, cqn });
    }

    #[test]
    fn flags_do_not_mix(signalled: bool, solicited: bool, f in fence()) {
        let wqe = Wqe::nop().fence(f).signalled(signalled).solicited(solicited);
        let ctrl = Ctrl::parse(wqe.emit(0, Qpn::MAX)[0]);
        prop_assert_eq!((ctrl.signalled(), ctrl.solicited(), ctrl.fenced()), (signalled, solicited, f != Fence::None));
        prop_assert_eq!(Fence::from_bits(ctrl.fm_ce_se), Some(f));
        let known = flags::CQ_MASK | flags::SOLICITED | flags::FENCE_MASK;
        prop_assert_eq!(ctrl.fm_ce_se & !known, 0);
    }

    #[test]
    fn control_segments(idx: u16, opcode: u8, opmod: u8, q in qpn(), ds: u8, fm_ce_se: u8, imm: u32) {
        let ctrl = Ctrl { idx, opcode, opmod, qpn: q.get(), ds, fm_ce_se, imm };
        prop_assert_eq!(Ctrl::parse(ctrl.emit()), ctrl);
        if let Ok(op) = Opcode::try_from(opcode) {
            prop_assert_eq!(seg::ctrl(idx, op, opmod, q, ds, fm_ce_se, imm), ctrl.emit());
        }
    }

    #[test]
    fn lists(pieces in prop::collection::vec((any::<bool>(), local(0..=MAX), 0..40u32), 2..8)) {
        // A SEND of several pieces, inline and not, as UCX sends a header and a buffer.
        let mut slots = vec![Chunk::ZERO];
        let mut want = vec![];
        for (inline, l, len) in &pieces {
            if *inline {
                slots.push(seg::inline_first(*len, [7; 12]));
                slots.extend(vec![Chunk([0x0707_0707_0707_0707; 2]); seg::inline_ds(*len) as usize - 1]);
                want.push((u64::from(*len), None));
            } else {
                slots.push(seg::data(l.len, l.key, l.addr));
                want.push((u64::from(l.len), Some(*l)));
            }
        }
        slots[0] = seg::ctrl(0, Opcode::Send, 0, Qpn::MAX, slots.len() as u8, 0, 0);
        let Request::Send { local: local @ Payload::List(_), .. } = Request::parse(&slots)? else {
            return Err(TestCaseError::fail("not a list"));
        };
        let got: Vec<_> = local.pieces().map(|p| match p {
            Piece::Local(l) => (p.len(), Some(l)),
            Piece::Inline(i) => {
                assert!(i.bytes().all(|b| b == 7));
                (p.len(), None)
            }
        }).collect();
        prop_assert_eq!(&got, &want);
        prop_assert_eq!(local.len(), want.iter().map(|w| w.0).sum::<u64>());
    }

    #[test]
    fn completions(q in qpn(), opcode: u8, counter: u16, owner in 0..2u8, bytes: u32, imm: u32, s: u8, v: u8) {
        let tail = |kind| CqeTail::new(counter, kind, owner);
        let ok = Cqe::parse(&cqe::ok_chunks(q, opcode, counter, owner, bytes));
        prop_assert_eq!(ok, Cqe { tail: tail(Kind::Requester), qpn: q, opcode, byte_cnt: bytes, imm: 0 });
        for kind in [Kind::ResponderWriteImm, Kind::ResponderSend, Kind::ResponderSendImm] {
            let got = Cqe::parse(&cqe::recv_chunks(kind, q, counter, owner, bytes, imm));
            prop_assert_eq!(got, Cqe { tail: tail(kind), qpn: q, opcode: 0, byte_cnt: bytes, imm });
        }
        for kind in [Kind::RequesterError, Kind::ResponderError] {
            let got = cqe::error_chunks(kind, q, opcode, counter, owner, Syndrome(s), Vendor(v));
            let want = ErrorCqe { tail: tail(kind), qpn: q, opcode, syndrome: Syndrome(s), vendor: Vendor(v) };
            prop_assert_eq!(ErrorCqe::parse(&got), Some(want));
        }
    }

    #[test]
    fn doorbells(pi: u64, q in qpn()) {
        prop_assert_eq!(db::parse(db::doorbell_word(pi, q)), ((pi & 0xff_ffff) as u32, q));
        prop_assert_eq!(db::parse_record(db::record(pi)), pi as u16);
    }

    #[test]
    fn four_byte_arithmetic_is_the_low_half(old: u32, add: u32, boundary: u32) {
        // Garbage above must not reach the low half.
        let wide = arith::masked_add(u64::from(old) | 5 << 32, u64::from(add) | 9 << 32, boundary.into());
        prop_assert_eq!(wide as u32, arith::masked_add(old.into(), add.into(), boundary.into()) as u32);
        prop_assert_eq!(arith::masked_add(old.into(), add.into(), 0) as u32, old.wrapping_add(add));
    }
}

#[test]
fn refusals_name_field_value_and_limit() {
    let r = Remote {
        addr: 0x1004,
        key: Key(1),
    };
    let l = |len| Local {
        addr: 0,
        key: Key(2),
        len,
    };
    let max = u64::from(MAX);
    let write = Opcode::RdmaWrite;
    let too_long = WqeError::Length {
        opcode: write,
        value: 1 << 31,
        min: 0,
        max,
    };
    assert_eq!(Wqe::write(r, l(1 << 31)), Err(too_long));
    assert_eq!(
        too_long.to_string(),
        "length 2147483648 does not fit RDMA_WRITE, which takes 0 to 2147483647 bytes a segment"
    );
    assert_eq!(
        Wqe::read(r, l(u32::MAX)).unwrap_err().vendor(),
        Vendor::BAD_LENGTH
    );
    assert_eq!(
        Wqe::send(l(u32::MAX)).unwrap_err().syndrome(),
        Syndrome::LOCAL_LENGTH
    );
    assert_eq!(
        Wqe::dump(l(0)),
        Err(WqeError::Length {
            opcode: Opcode::Dump,
            value: 0,
            min: 1,
            max
        })
    );
    assert_eq!(
        Wqe::write_inline(r, &[0; 93]),
        Err(WqeError::Inline {
            value: 93,
            room: 92
        })
    );
    assert_eq!(
        Wqe::send_inline(&[0; 109]),
        Err(WqeError::Inline {
            value: 109,
            room: 108
        })
    );
    let fa = Opcode::FetchAdd;
    assert_eq!(
        Wqe::fetch_add(r, l(4), 1),
        Err(WqeError::Length {
            opcode: fa,
            value: 4,
            min: 8,
            max: 8
        })
    );
    assert_eq!(
        Wqe::fetch_add(r, l(8), 1),
        Err(WqeError::Misaligned {
            addr: 0x1004,
            align: 8
        })
    );
    assert!(
        Wqe::masked_fetch_add4(r, l(4), 1, 0).is_ok(),
        "4 bytes need an alignment of 4"
    );
    let odd = Remote { addr: 0x1002, ..r };
    let misaligned = Wqe::masked_compare_swap4(odd, l(4), (0, 0), (0, 0)).unwrap_err();
    assert_eq!(
        misaligned,
        WqeError::Misaligned {
            addr: 0x1002,
            align: 4
        }
    );
    assert_eq!(
        (misaligned.syndrome(), misaligned.vendor()),
        (Syndrome::REMOTE_INVAL_REQ, Vendor::MISALIGNED)
    );
}

/// A WQE from its opcode byte, opmod, ds and body, with the number of chunks given.
#[track_caller]
fn refused(opcode: u8, opmod: u8, ds: u8, body: &[Chunk], want: WqeError, vendor: Vendor) {
    let mut slots = vec![seg::ctrl_raw(
        0,
        opcode,
        opmod,
        u32::from(ds).swap_bytes(),
        8,
        0,
    )];
    slots.extend(body);
    assert_eq!(Request::parse(&slots), Err(want));
    assert_eq!(want.vendor(), vendor);
}

#[test]
fn parse_refuses_what_it_should() {
    let raddr = seg::raddr(0x40, Key(1));
    let data = |len| seg::data(len, Key(2), 0);
    let inline = seg::inline8(1, 8);
    let z = Chunk::ZERO;
    let mcs = Opcode::MaskedCompareSwap;

    assert_eq!(
        Request::parse(&[]),
        Err(WqeError::Truncated { ds: 0, have: 0 })
    );
    refused(
        0x25,
        0,
        1,
        &[],
        WqeError::Opcode { value: 0x25 },
        Vendor::BAD_OPCODE,
    );
    refused(
        0x00,
        0,
        0,
        &[],
        WqeError::Ds {
            opcode: Opcode::Nop,
            value: 0,
            min: 1,
            max: 63,
        },
        Vendor::BAD_DS,
    );
    refused(
        0x00,
        0,
        64,
        &[],
        WqeError::Ds {
            opcode: Opcode::Nop,
            value: 64,
            min: 1,
            max: 63,
        },
        Vendor::BAD_DS,
    );
    refused(
        0x08,
        0,
        1,
        &[],
        WqeError::Ds {
            opcode: Opcode::RdmaWrite,
            value: 1,
            min: 2,
            max: 63,
        },
        Vendor::BAD_DS,
    );
    refused(
        0x08,
        0,
        3,
        &[raddr],
        WqeError::Truncated { ds: 3, have: 2 },
        Vendor::BAD_DS,
    );
    refused(
        0x12,
        0,
        3,
        &[raddr, z],
        WqeError::Ds {
            opcode: Opcode::FetchAdd,
            value: 3,
            min: 4,
            max: 4,
        },
        Vendor::BAD_DS,
    );
    let opmod = WqeError::Opmod {
        opcode: Opcode::RdmaWrite,
        value: 9,
        allowed: &[0],
    };
    refused(0x08, 9, 3, &[raddr, data(8)], opmod, Vendor::BAD_OPMOD);
    assert_eq!(
        opmod.to_string(),
        "opmod 0x09 does not fit RDMA_WRITE, which takes 0x00"
    );
    let opmod = WqeError::Opmod {
        opcode: mcs,
        value: 0,
        allowed: &[8, 9],
    };
    refused(0x14, 0, 4, &[raddr, z, data(8)], opmod, Vendor::BAD_OPMOD);
    // Right opmod, but the size of the other width.
    let five = WqeError::Ds {
        opcode: mcs,
        value: 4,
        min: 5,
        max: 5,
    };
    refused(0x14, 9, 4, &[raddr, z, data(8)], five, Vendor::BAD_DS);
    assert_eq!(
        five.to_string(),
        "ds 4 does not fit MASKED_COMPARE_SWAP, which takes 5 chunks here"
    );
    refused(
        0x14,
        8,
        5,
        &[raddr, z, z, data(4)],
        WqeError::Ds {
            opcode: mcs,
            value: 5,
            min: 4,
            max: 4,
        },
        Vendor::BAD_DS,
    );
    // Inline where none may be.
    let no = |opcode| WqeError::InlineNotAllowed { opcode };
    refused(
        0x10,
        0,
        3,
        &[raddr, inline],
        no(Opcode::RdmaRead),
        Vendor::BAD_INLINE,
    );
    refused(
        0x12,
        0,
        4,
        &[raddr, z, inline],
        no(Opcode::FetchAdd),
        Vendor::BAD_INLINE,
    );
    refused(0x23, 0, 2, &[inline], no(Opcode::Dump), Vendor::BAD_INLINE);
    // Inline longer than the WQE: 13 bytes need two chunks.
    refused(
        0x08,
        0,
        3,
        &[raddr, seg::inline8(1, 13)],
        WqeError::Inline {
            value: 13,
            room: 12,
        },
        Vendor::BAD_INLINE,
    );
    let huge = seg::inline8(1, MAX);
    refused(
        0x0a,
        0,
        2,
        &[huge],
        WqeError::Inline {
            value: MAX.into(),
            room: 12,
        },
        Vendor::BAD_INLINE,
    );
    let length = WqeError::Length {
        opcode: Opcode::FetchAdd,
        value: 4,
        min: 8,
        max: 8,
    };
    refused(0x12, 0, 4, &[raddr, z, data(4)], length, Vendor::BAD_LENGTH);
    let odd = seg::raddr(0x44, Key(1));
    refused(
        0x11,
        0,
        4,
        &[odd, z, data(8)],
        WqeError::Misaligned {
            addr: 0x44,
            align: 8,
        },
        Vendor::MISALIGNED,
    );
    let wide = Chunk::from_be32(0, 0, 1, 0x0100_0000);
    refused(
        0x0f,
        0,
        2,
        &[wide],
        WqeError::Cqn { value: 0x0100_0000 },
        Vendor::BAD_WAIT_CQ,
    );
}
