from proxy.core.pins import Pin, PinBook


def pin(pin_id="p", engines=("a",), expires=10.0):
    return Pin(pin_id, {engine: f"{engine}-pin" for engine in engines}, 4, expires, "label")


def book(*pins):
    result = PinBook()
    for each in pins:
        result.add(each)
    return result


def test_a_pin_holds_until_its_time_is_up():
    pins = book(pin())
    assert pins.active(9.9) == (pin(),)
    assert pins.active(10.0) == ()
    assert pins.active(0.0) == ()


def test_a_pin_is_taken_once():
    pins = book(pin())
    assert pins.take("p", 0.0) == pin()
    assert pins.take("p", 0.0) is None


def test_what_comes_and_goes_before_its_time_is_told():
    told = []
    pins = PinBook()
    pins.listeners.append(lambda: told.append(len(pins.active(0.0))))
    pins.add(pin("one"))
    pins.add(pin("two"))
    pins.take("one", 0.0)
    pins.forget_engine("a")
    assert told == [1, 2, 1, 0]


def test_one_that_has_ended_cannot_be_taken():
    assert book(pin()).take("p", 10.0) is None


def test_a_lost_engine_takes_its_pins_along():
    pins = book(pin("one", ("a",)), pin("both", ("a", "b")), pin("other", ("b",)))
    pins.forget_engine("a")
    assert [(p.pin_id, dict(p.engine_pins)) for p in pins.active(0.0)] == [
        ("both", {"b": "b-pin"}),
        ("other", {"b": "b-pin"}),
    ]


def test_only_the_pins_that_are_meant():
    pins = book(pin("one"), pin("two"))
    pins.forget_engine("a", lambda p: p.pin_id == "two")
    assert [p.pin_id for p in pins.active(0.0)] == ["one"]
